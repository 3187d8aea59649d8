"""Observers of a simulation: event log, Chrome trace, tables."""
