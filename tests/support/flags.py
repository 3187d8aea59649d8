"""Flags of `twofold serve` that end-to-end tests use."""

from support.device import DEVICE

SPLIT = ("--prefill", "1", "--decode", "1")
COLOCATED = ("--colocated", "2")
ENGINE = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "32", "--device", DEVICE)
