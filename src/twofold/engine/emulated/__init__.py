"""An engine that computes nothing and takes the time that a performance model says."""
