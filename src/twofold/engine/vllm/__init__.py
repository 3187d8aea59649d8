"""vLLM as an engine: its scheduler, its block pool, and the KV connector for hand-offs."""
