"""The controller places requests on workers, forwards leases and orders tokens.

It tracks the whole life of a request, and is the only sender of requests, leases and aborts to workers. A worker
therefore learns of a request before its lease, and the controller returns leases that are granted after their
request has ended. A request whose worker is lost starts another attempt; a request that no worker can take waits.

    controller.py    the service on its own workers: wiring, messages of workers, health checks
    requests.py      live requests: admission, placement, reports of workers, replay, end
    live_request.py  one live request: attempts and token order
    membership.py    workers of the cluster: registration, status, retirement, loss
    registry.py      which workers run: heartbeats, failures, restarts
    remote.py        hosts that join the service, and their workers
    health.py        circuit breakers and availability
    replanning.py    role changes on traffic shifts and shortages
    forecast.py      measured links and cached prefixes for the router
    prompt_keys.py   block keys of prompts by tenant
    mailbox.py       messages between processes
    heartbeat.py     parent watchdog and clock offsets
    service.py       the service behind the gateway, shared with external servers: requests, roles, output
"""
