"""Functions that connect to a Ray cluster and list the cluster's nodes."""
