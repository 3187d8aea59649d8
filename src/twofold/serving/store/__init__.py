"""KV store of a host: blocks in host memory and on disk, shared by the workers of the host."""
