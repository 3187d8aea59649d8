"""Rules of other simulators, reproduced to compare with their results."""
