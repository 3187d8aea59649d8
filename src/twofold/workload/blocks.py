"""Blocks of prompts in traces, and their keys in sessions."""

from hashlib import blake2b
from typing import Final

from twofold.request import BlockKey, Request

BLOCK_TOKENS: Final = 512  # block size of Mooncake's hash_ids; see Request.prefix_blocks


def session_keys(request: Request, tokens: int, block_tokens: int) -> tuple[BlockKey, ...]:
    """Return the keys of the full blocks of the first `tokens` tokens of a turn's prompt and output."""
    # The turns of a session extend each other, so a block is identified by its session and its index.
    shared = request.shared_tokens // block_tokens
    own = int.from_bytes(blake2b(request.session.encode(), digest_size=5).digest()) << 23
    return tuple(index + (0 if index < shared else own) for index in range(tokens // block_tokens))
