"""Fitting performance models to measurements."""
