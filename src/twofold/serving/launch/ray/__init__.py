"""Workers on the nodes of a Ray cluster.

    launcher.py   in the service: jobs, the actor class, and the launcher that starts the driver
    driver.py     the only process that uses Ray: chooses nodes, creates and replaces actors
    host.py       child process of an actor, which joins the service with one worker as `twofold join` does

Ray reports free resources and failures. The controller decides which workers run, as for any host that joins.
"""
