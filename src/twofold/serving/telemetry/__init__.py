"""Telemetry of a service: Prometheus metrics, dashboard history, logs, traces and journals of scheduling decisions."""
