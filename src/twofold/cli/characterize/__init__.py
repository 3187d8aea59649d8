"""The command `twofold characterize`: measure an instance and fit a performance profile."""
