"""Cluster specs: files, validation, instance profiles and KV transfer paths."""
