"""The emulated engine: sleeps for the time predicted by a performance model, and computes nothing."""
