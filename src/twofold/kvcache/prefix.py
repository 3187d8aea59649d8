"""The prefix hash chain: equal keys mean an equal block after an equal prefix (Mooncake section 4, Figure 3)."""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

KEY_BYTES = 16


def prefix_keys(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> Iterator[bytes]:
    """Yield one key per *full* block of `token_ids`: key[i] = hash(key[i−1], tokens of block i).

    `salt` starts the chain, so that tenants with different salts never share a key. Keys have KEY_BYTES bytes.
    """
    key = root_key(salt)
    for end in range(block_size, len(token_ids) + 1, block_size):
        key = next_key(key, token_ids[end - block_size : end])
        yield key


def root_key(salt: bytes) -> bytes:
    """What a chain begins with: the key of no block."""
    return blake2b(salt, digest_size=KEY_BYTES).digest()


def next_key(key: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block of these tokens after the block of `key`."""
    return blake2b(key + array("q", token_ids).tobytes(), digest_size=KEY_BYTES).digest()


def tenant_salt(tenant: str, model: str = "", secret: bytes = b"") -> bytes:
    """What starts a tenant's chains: no other tenant, and no other model, ever has one of its keys.

    `secret` is the cluster's own, so that nobody outside can compute a key. It takes at most 64 bytes.
    """
    names = b"".join(len(name).to_bytes(4) + name for name in (tenant.encode(), model.encode()))
    return blake2b(names, digest_size=KEY_BYTES, key=secret).digest()
