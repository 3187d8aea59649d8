"""A Ray cluster as it is: a way to it, and the nodes that it has. Ray is imported only where one is asked for."""
