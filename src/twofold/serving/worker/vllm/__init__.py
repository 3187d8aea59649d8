"""Workers that run vLLM: its scheduler decides what runs next, and this is the seam between it and the service."""
