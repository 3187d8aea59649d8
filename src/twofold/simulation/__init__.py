"""The cluster simulator: virtual instances and links on a virtual clock, driven by the schedulers of the service."""
