"""The live service: gateway, controller, workers and their launcher."""
