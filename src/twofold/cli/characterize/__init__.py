"""`twofold characterize`: flags, measurement, analysis of measured profiles (CSV), and report."""
