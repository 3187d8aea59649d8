"""Reports: summaries, tables, JSON and HTML pages."""
