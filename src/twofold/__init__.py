"""Twofold plans, simulates and serves LLMs in two phases, prefill and decode, on separate pools."""

__version__ = "0.1.0"
