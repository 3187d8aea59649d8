"""Characterization of an instance: measure prefill, decode and mixed iterations, and fit a profile to them."""
