"""The scheduler of one instance: queues, batches, KV reservation and preemption."""
