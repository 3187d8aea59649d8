"""The store of a host: KV blocks in its memory and on its disk, shared by its workers."""
