"""Cluster simulator: virtual instances and links under a virtual clock, driven by the schedulers of the service."""
