"""A worker: the process, or processes, of one instance."""
