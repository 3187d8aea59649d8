"""`twofold serve`, `twofold route` and `twofold join`: flags, checks, configuration."""
