"""Scheduling rules of other simulators, reproduced in order to compare Twofold's results with theirs."""
