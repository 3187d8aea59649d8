"""Cluster simulator: the live service's schedulers run simulated instances and links on a virtual clock."""
