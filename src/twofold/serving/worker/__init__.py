"""A worker: one process that runs one instance."""
