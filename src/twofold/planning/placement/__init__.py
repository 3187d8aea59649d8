"""DistServe's placement (OSDI'24): parallelism and instances per phase for the most goodput per accelerator."""
