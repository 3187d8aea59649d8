"""Start and stop the processes of a service: locally, on hosts that join, and on a Ray cluster."""
