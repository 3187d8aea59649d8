"""Admission control: the bounded queue in front of the cluster, limits per API key, and overload rules."""
