"""DistServe's placement: where instances go and how each is parallelised, for the most goodput per accelerator."""
