"""Engines: what runs a worker's batches."""
