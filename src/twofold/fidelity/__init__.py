"""Fidelity of the simulator: calibration on a live service, and comparison of live and simulated latencies."""
