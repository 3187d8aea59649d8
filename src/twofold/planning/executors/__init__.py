"""Executors that simulate trials on local cores or a Ray cluster."""
