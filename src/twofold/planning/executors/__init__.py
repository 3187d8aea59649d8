"""Executors, which run simulations of designs on local cores or a Ray cluster."""
