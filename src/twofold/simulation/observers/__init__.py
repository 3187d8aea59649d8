"""Observers of a simulation: traces, logs and tables."""
