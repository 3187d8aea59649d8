"""Re-planning: traffic monitoring and new role splits."""
