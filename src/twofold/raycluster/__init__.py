"""Connection to a Ray cluster and its nodes. These modules import Ray only inside the functions that need it."""
