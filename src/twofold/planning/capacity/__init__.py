"""KV cache capacity planning: hit rate and saved accelerator time for every cache size."""
