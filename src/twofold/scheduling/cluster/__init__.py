"""The cluster scheduler: instance loads and pools, the router interface, hand-off policies and load forecasts."""
