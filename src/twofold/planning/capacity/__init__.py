"""How large a KV cache pays: hit rates and saved GPU time at every capacity, from one pass over a trace."""
