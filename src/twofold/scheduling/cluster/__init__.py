"""The cluster scheduler: pools and loads of instances, router interface, hand-off policies and load forecasts."""
