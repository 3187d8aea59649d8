"""DistServe's placement search (OSDI'24): the placement of both phases with the highest goodput per accelerator."""
