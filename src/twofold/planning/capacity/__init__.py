"""KV cache capacity: hit rates and saved accelerator time at every size."""
