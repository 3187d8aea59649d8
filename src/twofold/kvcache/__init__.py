"""Bookkeeping of the KV cache: blocks, leases and cached prefixes. This package does not access the KV memory."""
