"""Reports on simulations: tables, JSON and HTML pages."""
