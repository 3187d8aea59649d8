"""DistServe's placement search (OSDI'24), which maximizes goodput per accelerator.

The search chooses the parallelism and the number of instances of each phase.
"""
