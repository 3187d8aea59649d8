"""Numbers for people: summaries and tables."""
