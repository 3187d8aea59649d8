"""Bookkeeping of the KV cache: blocks, leases and cached prefixes. The memory itself is not accessed."""
