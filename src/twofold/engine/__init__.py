"""Engines, which run the batches of a worker."""
