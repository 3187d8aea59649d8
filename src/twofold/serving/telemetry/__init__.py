"""Telemetry of a service: Prometheus metrics, recent history for the dashboard, logs, traces and decision journals."""
