"""Scheduling rules of other simulators, reproduced to compare Twofold's results with their results."""
