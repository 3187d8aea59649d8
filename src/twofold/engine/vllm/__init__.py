"""vLLM as an engine: its scheduler and block pool, and a KV connector between its instances."""
