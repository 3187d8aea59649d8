"""Capacity planning of KV caches: hit rate and saved accelerator time at every cache size."""
