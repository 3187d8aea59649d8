"""Performance models, which predict seconds and watts of an iteration: fitted to profiles, published or estimated."""
