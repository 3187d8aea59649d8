"""`twofold simulate`: its flags, their conversion to a cluster spec, and the run."""
