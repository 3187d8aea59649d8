"""Authentication and encryption between hosts: the cluster key and CURVE sockets."""
