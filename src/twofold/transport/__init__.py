"""Transports, which move KV blocks between instances."""
