"""Requests to plan, simulate and serve with: traces, generators, arrival processes."""
