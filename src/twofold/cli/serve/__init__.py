"""`twofold serve`, `twofold route` and `twofold join`: flags, their validation, and conversion to configurations."""
