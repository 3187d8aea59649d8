"""Workloads: trace formats, length distributions, arrival processes and rescaling."""
