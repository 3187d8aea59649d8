"""The live service: gateway, controller, launchers, workers, host stores and telemetry."""
