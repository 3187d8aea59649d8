"""What moves KV blocks between instances."""
