"""Launchers, which start and stop the processes of a service on this host, on joining hosts and on Ray."""
