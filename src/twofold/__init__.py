"""Twofold plans, simulates and serves large language models in two phases."""

__version__ = "0.1.0"
