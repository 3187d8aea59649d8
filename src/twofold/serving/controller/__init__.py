"""Controller of a service: places requests on workers, and returns output tokens in order.

Requests wait in the controller while no worker can run them. The requests of a lost worker run again on other workers.

    controller.py    the controller itself: start-up, worker messages, health checks
    requests.py      live requests: admission, placement, worker reports, retries, end
    live_request.py  one live request: placement and token order
    membership.py    workers in the cluster: registration, status, retirement, loss
    registry.py      worker processes: heartbeats, failures, restarts
    remote.py        workers on hosts that join the service over the network
    health.py        circuit breakers and availability of workers
    replanning.py    role changes after traffic shifts, and while workers are missing
    forecast.py      load forecasts for the router, and measured speeds of links and prefill
    prompt_keys.py   block keys of prompts, separate for each tenant
    mailbox.py       messages between processes
    heartbeat.py     heartbeats over the network: timeouts, and clock offsets of hosts
    service.py       base class of the service that the gateway calls
"""
