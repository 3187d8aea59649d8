"""Controller of a service: places requests on workers, forwards leases, and returns output tokens in order.

Workers receive requests, leases and aborts only from the controller, so a lease never arrives before its request. If a
worker is lost, its requests run again on other workers. Requests wait in the controller while no worker can run them.

    controller.py    the service on its own workers: start-up, worker messages, health checks
    requests.py      live requests: admission, placement, worker reports, retries, end
    live_request.py  one live request: placement and token order
    membership.py    workers in the cluster: registration, status, retirement, loss
    registry.py      worker processes: heartbeats, failures, restarts
    remote.py        joined hosts and their workers
    health.py        circuit breakers and availability of workers
    replanning.py    role changes after traffic shifts, and while workers are missing
    forecast.py      measured links and cached prefixes for the router
    prompt_keys.py   block keys of prompts, separate for each tenant
    mailbox.py       messages between processes
    heartbeat.py     watchdogs of processes on other hosts, and clock offsets
    service.py       base class of the service that the gateway calls
"""
