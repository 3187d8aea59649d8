"""Workers on the nodes of a Ray cluster.

launcher.py   runs in the service process: starts the driver
driver.py     the only process that uses Ray: chooses nodes, creates and removes actors
host.py       child process of an actor, which joins the service with one worker as `twofold join` does
"""
