"""The built-in engine: models of `transformers`, run through its attention interface over our paged KV cache."""
