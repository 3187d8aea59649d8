"""Cluster simulator: simulated instances and links on a virtual clock, scheduled by the live service's code."""
