"""KV cache capacity planning: hit rates and saved accelerator time at every cache size."""
