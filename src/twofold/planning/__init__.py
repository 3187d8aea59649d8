"""Cluster planning: searches over designs by simulation."""
