"""Transports: how KV blocks move between instances."""
