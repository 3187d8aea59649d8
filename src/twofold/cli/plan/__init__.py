"""`twofold plan`: flags, queries, searches."""
