"""Admission control: the bounded queue before the cluster, limits per API key, and overload rules."""
