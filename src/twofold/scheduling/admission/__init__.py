"""Admission control and overload rejection."""
