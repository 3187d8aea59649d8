"""Performance models, which predict the time and power of an iteration. They are fitted, published or estimated."""
