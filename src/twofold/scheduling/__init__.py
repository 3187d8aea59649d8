"""Decisions, pure: no clock, no I/O, no thread. The same objects run live and under a virtual clock."""
