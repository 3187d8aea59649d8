"""Worker processes of a live service: one process for each rank of an instance."""
