"""Calibrate the simulator on a live service and compare live and simulated latencies."""
