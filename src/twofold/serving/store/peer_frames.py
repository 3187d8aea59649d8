"""What the stores of two hosts say to each other. Whatever comes is checked: see `MOST_KEYS` and `Key`.

the one that fetches                      the one that has
  │ Give: keys ─────────────────────────────▶ │
  │ ◀─ Given: checksums, and a frame of bytes │   as blocks come into its memory; the last one says so
  │                             for each block│
"""

from typing import Annotated

import msgspec

MOST_KEYS = 4096
_MOST_KEY_BYTES = 64
MOST_QUESTION_BYTES = (_MOST_KEY_BYTES + 4) * MOST_KEYS + 4096
MOST_BYTES_AT_ONCE = 16 << 20  # of blocks that are asked for in one question

Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=_MOST_KEY_BYTES)]
Crc32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Give(msgspec.Struct, frozen=True, tag=True):
    """As many leading blocks of these as are there. `contents` are what blocks mean to the one that asks.

    `number` tells the questions of one connection apart.
    """

    contents: bytes
    number: int
    keys: Annotated[list[Key], msgspec.Meta(max_length=MOST_KEYS)]


class Given(msgspec.Struct, frozen=True, tag=True):
    """Some more blocks of question `number`: their CRC-32 by their index in it, in the order of the frames that follow.

    With `last` no more are to come.
    """

    number: int
    checksums: Annotated[dict[int, Crc32], msgspec.Meta(max_length=MOST_KEYS)]
    last: bool


def blocks_at_once(block_bytes: int) -> int:
    """How many blocks a question is for at most."""
    return max(1, min(MOST_KEYS, MOST_BYTES_AT_ONCE // block_bytes))
