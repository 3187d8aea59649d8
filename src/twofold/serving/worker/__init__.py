"""The worker: one process for each rank of an instance."""
