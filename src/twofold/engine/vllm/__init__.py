"""vLLM as the engine of a worker: its scheduler and its block pool, with our KV connector between its instances."""
