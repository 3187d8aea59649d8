"""What runs a batch for real."""
