"""Reports on plans: tables, JSON and a page of pictures."""
