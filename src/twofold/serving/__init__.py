"""The live service: gateway, controller, launchers, workers, KV stores and telemetry."""
