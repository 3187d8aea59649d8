"""Where trials are simulated: on this machine's cores or on a Ray cluster, one file each."""
