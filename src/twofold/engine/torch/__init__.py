"""Built-in engine that runs `transformers` models over a paged KV cache."""
