"""`twofold simulate`: flags, the simulated cluster, the run."""
