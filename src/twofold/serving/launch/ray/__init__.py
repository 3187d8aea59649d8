"""Workers on the nodes of a Ray cluster.

launcher.py   starts the driver process
driver.py     driver process: chooses nodes, creates and removes Ray actors
host.py       child process of a Ray actor: runs one worker of the service
"""
