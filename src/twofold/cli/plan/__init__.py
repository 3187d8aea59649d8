"""`twofold plan`: its flags, and the searches that it runs."""
