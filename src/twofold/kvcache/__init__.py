"""The KV cache as accounts: blocks, leases, prefix hashes. No memory is touched here."""
