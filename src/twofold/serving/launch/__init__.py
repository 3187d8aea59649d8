"""Launchers, which start and stop the processes of a service: on this host, on hosts that join, and on Ray."""
