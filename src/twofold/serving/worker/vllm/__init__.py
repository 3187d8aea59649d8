"""Workers that run vLLM, with vLLM's own scheduler."""
