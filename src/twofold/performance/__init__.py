"""Fitted, published and estimated performance models, which predict the time and power of an iteration."""
