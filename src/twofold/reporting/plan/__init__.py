"""Reports on plans: tables, JSON and HTML pages."""
