"""The engines of workers. An engine runs the batches of its worker."""
