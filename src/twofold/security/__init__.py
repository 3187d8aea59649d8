"""Who may speak to a service from another host: the cluster key, and CURVE sockets that ask for it."""
