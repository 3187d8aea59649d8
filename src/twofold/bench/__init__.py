"""Load generator for OpenAI endpoints, and utilities shared by the benchmarks."""
