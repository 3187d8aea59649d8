"""The KV cache as accounts: blocks, leases, prefixes and what is cached of them. No memory is touched here."""
