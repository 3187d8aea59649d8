"""Cluster planning: find the best cluster design by simulation."""
