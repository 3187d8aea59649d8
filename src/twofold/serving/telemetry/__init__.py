"""Metrics, traces, logs and history of a service."""
