"""The built-in engine: runs models of `transformers` through their attention interface over a paged KV cache."""
