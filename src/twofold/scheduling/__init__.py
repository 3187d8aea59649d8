"""Scheduling logic without clock, I/O or threads, shared by the live service and the simulator."""
