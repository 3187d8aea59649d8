"""`twofold serve`, `twofold route` and `twofold join`: flags, validation, and conversion to configurations."""
