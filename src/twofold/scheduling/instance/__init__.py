"""One instance's scheduler: queues, batches, KV reservation, preemption."""
