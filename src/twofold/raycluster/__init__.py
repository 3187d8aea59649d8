"""Connection to a Ray cluster and its nodes. These modules import Ray only when a function needs it."""
