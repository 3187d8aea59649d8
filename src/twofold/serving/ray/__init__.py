"""Workers on the nodes of a Ray cluster.

    launcher.py   in the service: starts the driver, passes orders and reports on
    driver.py     a process of its own, the only one that speaks to Ray: makes actors, and makes them again
    placing.py    which node a worker goes to
    actor.py      on a node: keeps the host of one worker
    host.py       the actor's child, which joins the service with that worker as `twofold join` does
    job.py        what they are told

Ray says where there is room and what has died; who may work is decided by the controller, as for any host that joins.
"""
