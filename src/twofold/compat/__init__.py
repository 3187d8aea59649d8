"""Reproductions of the rules of other simulators, to compare the results of Twofold with theirs."""
