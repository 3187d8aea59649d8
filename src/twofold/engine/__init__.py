"""Engines of workers, which run the batches that the scheduler selects."""
