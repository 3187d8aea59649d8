"""Demo behind `make demo`."""
