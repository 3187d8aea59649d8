"""Bookkeeping of the KV cache: blocks, leases and cached prefixes. No memory is touched here."""
