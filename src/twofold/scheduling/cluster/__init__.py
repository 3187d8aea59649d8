"""The cluster scheduler: pools, routes, forecasts."""
