"""The emulated engine: takes the time of a performance model and computes nothing."""
