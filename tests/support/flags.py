"""Flags of the services that end-to-end tests run against."""

import pytest

SPLIT = ("--prefill", "1", "--decode", "1")
COLOCATED = ("--colocated", "2")
ENGINE = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "32")

# For tests against a shared service: where tests run side by side these stay together, and start it once.
SHARES_LLAMA = pytest.mark.xdist_group("services of llama")
