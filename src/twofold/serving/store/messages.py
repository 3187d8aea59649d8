"""What a host's store and its clients say to each other.

client                                   store
  │ Hello ───────────────────────────────▶ │
  │ ◀───────────────────────────── Welcome │
  │ Ask: Lookup, Load, Put, Fetch ───────▶ │
  │ ◀─ Answer: Found, Held, Leased, Fetched │  slots are the client's until it says otherwise, or is dead
  │ Ask: Release, Commit ────────────────▶ │

What the stores of two hosts say to each other. Whatever comes is checked: see `MOST_KEYS` and `Key`.

the one that fetches                      the one that has
  │ Give: keys ─────────────────────────────▶ │
  │ ◀─ Given: checksums, and a frame of bytes │   as blocks come into its memory; the last one says so
  │                             for each block│
"""

from typing import Annotated, NamedTuple

import msgspec

from twofold.serving.messages import Message


class Block(NamedTuple):
    """A slot, and the CRC-32 of the block in it (of no meaning where it is yet to be filled)."""

    slot: int
    checksum: int


# -- operations on the disk ------------------------------------------------------------------------------------------


class DiskWrite(NamedTuple):
    """Write what is in this slot of the memory, block `position` of its prompt, unless it is on the disk already.

    `spare`: as below.
    """

    key: bytes
    position: int
    slot: int
    checksum: int
    spare: bool


class DiskRead(NamedTuple):
    """Read a block into this slot of the memory."""

    key: bytes
    slot: int


class DiskSpare(NamedTuple):
    """The memory has this block too: on the disk it may stay as long as its room is not needed for another."""

    key: bytes


class DiskForget(NamedTuple):
    """A block is wanted no more."""

    key: bytes


DiskOperation = DiskWrite | DiskRead | DiskSpare | DiskForget


# -- what is asked --------------------------------------------------------------------------------------------------


class Lookup(msgspec.Struct, frozen=True, tag=True):
    """How many leading blocks of these are there?"""

    keys: list[bytes]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Hold as many leading blocks of these as are there, until they are released."""

    keys: list[bytes]


class Put(msgspec.Struct, frozen=True, tag=True):
    """Lease slots for those blocks of a prompt, from the `start`-th on, that are not there."""

    keys: list[bytes]
    start: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """These blocks of a Put are whole; its other slots are given back, and the next ones are leased."""

    blocks: list[Block]


class Release(msgspec.Struct, frozen=True, tag=True):
    """These slots of a Load are read no more. With None a Load or a Put is over, whatever was still to come of it."""

    slots: list[int] | None = None


class FetchBlocks(msgspec.Struct, frozen=True, tag=True):
    """Bring those blocks of these that are not there from the store of another host, within `limit_s`.

    `address` is where that one gives blocks to others.
    """

    keys: list[bytes]
    address: str
    limit_s: float


StoreOperation = Lookup | Load | Put | Commit | Release | FetchBlocks


# -- what is answered -----------------------------------------------------------------------------------------------


class LookupResult(msgspec.Struct, frozen=True, tag=True):
    """So many leading blocks are there, of which the first `in_memory` need not be read from the disk."""

    blocks: int
    in_memory: int


class HeldBlocks(msgspec.Struct, frozen=True, tag=True):
    """Some more blocks of a Load, by their index in it. With `last` no more are to come."""

    blocks: dict[int, Block]
    last: bool


class LeasedSlots(msgspec.Struct, frozen=True, tag=True):
    """Slots to fill, by the blocks' index in the Put. A Commit is answered with the next; the `last` are none."""

    slots: dict[int, int]
    last: bool


class FetchResult(msgspec.Struct, frozen=True, tag=True):
    """A Fetch is over, and so many leading blocks are there now."""

    blocks: int


StoreResult = LookupResult | HeldBlocks | LeasedSlots | FetchResult


# -- how it travels -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """A client, whose process is `pid`, wants to use the store; repeated until it is answered."""

    client: str
    pid: int


class Welcome(Message, frozen=True, kw_only=True):
    """Where the memory of this life of the store is: `slots` slots of `block_bytes` bytes each, one after the other.

    It ends with process `pid`.
    """

    epoch: int
    pid: int
    address: str
    slots: int
    block_bytes: int


class StoreRequest(Message, frozen=True, kw_only=True):
    """From the client whose inbox this is; `number` tells its questions apart. Meant for one life of the store."""

    client: str
    epoch: int
    number: int
    what: StoreOperation


class StoreReply(Message, frozen=True, kw_only=True):
    """To question `number`, by the life of the store that it was asked of."""

    epoch: int
    number: int
    what: StoreResult


ToStore = Hello | StoreRequest
ToClient = Welcome | StoreReply


MOST_KEYS = 4096
_MOST_KEY_BYTES = 64
MOST_QUESTION_BYTES = (_MOST_KEY_BYTES + 4) * MOST_KEYS + 4096
MOST_BYTES_AT_ONCE = 16 << 20  # of blocks that are asked for in one question

Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=_MOST_KEY_BYTES)]
Crc32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class GetBlocks(msgspec.Struct, frozen=True, tag=True):
    """As many leading blocks of these as are there. `contents` are what blocks mean to the one that asks.

    `number` tells the questions of one connection apart.
    """

    contents: bytes
    number: int
    keys: Annotated[list[Key], msgspec.Meta(max_length=MOST_KEYS)]


class BlocksFollow(msgspec.Struct, frozen=True, tag=True):
    """Some more blocks of question `number`: their CRC-32 by their index in it, in the order of the frames that follow.

    With `last` no more are to come.
    """

    number: int
    checksums: Annotated[dict[int, Crc32], msgspec.Meta(max_length=MOST_KEYS)]
    last: bool


def blocks_at_once(block_bytes: int) -> int:
    """How many blocks a question is for at most."""
    return max(1, min(MOST_KEYS, MOST_BYTES_AT_ONCE // block_bytes))
