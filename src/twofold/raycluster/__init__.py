"""Connection to a Ray cluster and its nodes. Ray is imported on use only."""
