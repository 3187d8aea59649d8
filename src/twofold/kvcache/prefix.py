"""Hash keys of KV blocks: a key depends on all tokens up to the end of the block (Mooncake section 4, Figure 3)."""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from twofold.request import BlockChain, BlockKey

KEY_BYTES = 16


def prefix_keys(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> Iterator[bytes]:
    """Return the key of each full block of `token_ids`: key[i] = hash(key[i−1], tokens of block i)."""
    return _keys_after(root_key(salt), token_ids, block_size)  # tenants with different salts never share a key


def later_keys(chain: BlockChain, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> Iterator[bytes]:
    """Return the keys of the full blocks after those of `keys`. `token_ids` are the tokens after those blocks."""
    last = keys[-1] if keys else chain.root
    assert isinstance(last, bytes)  # noqa: S101  (narrows the type: only traces have integer keys)
    return _keys_after(last, token_ids, chain.block_size)


def _keys_after(key: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    for end in range(block_size, len(token_ids) + 1, block_size):
        key = next_key(key, token_ids[end - block_size : end])
        yield key


def root_key(salt: bytes) -> bytes:
    """Return the initial value of a hash chain, which depends on `salt`."""
    return blake2b(salt, digest_size=KEY_BYTES).digest()


def next_key(key: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a KV block that holds the tokens `token_ids`; `key` is the key of the preceding block."""
    return blake2b(key + array("q", token_ids).tobytes(), digest_size=KEY_BYTES).digest()


def tenant_salt(tenant: str, model: str = "", secret: bytes = b"") -> bytes:
    """Return the salt of a tenant and model for `prefix_keys`."""
    # Computable only with `secret`, which has at most 64 bytes.
    names = b"".join(len(name).to_bytes(4) + name for name in (tenant.encode(), model.encode()))
    return blake2b(names, digest_size=KEY_BYTES, key=secret).digest()
