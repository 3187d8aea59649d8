"""Performance models, fitted, published or estimated, which predict the seconds and watts of an iteration."""
