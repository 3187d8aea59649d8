"""Cluster descriptions: files, validation, instance profiles and transfer paths."""
