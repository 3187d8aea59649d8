"""`twofold characterize`: settings, measurement, analysis of a CSV, and report."""
