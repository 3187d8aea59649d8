"""What a cluster is: its description, validation, instance profiles and paths."""
