"""Twofold on Kubernetes: from a plan to values, and from values to the objects of a cluster."""
