"""Messages between a KV store, its clients and other hosts' stores. A client registers with Hello, sends StoreRequests,
and receives StoreReplies. A store asks another host's store for blocks with GetBlocks, and receives them in
BlocksFollow messages.
"""

from typing import Annotated, NamedTuple

import msgspec

from twofold.serving.messages import Message


class Block(NamedTuple):
    """Slot, in memory or on disk, and CRC-32 checksum of a KV block in the store. That of an empty slot is 0."""

    slot: int
    checksum: int


# -- operations on the disk -----------------------------------------------------------------------------------------


class DiskWrite(NamedTuple):
    """Disk operation: write a block from a memory slot to disk. `spare` is true if memory keeps the block too."""

    key: bytes
    position: int
    slot: int
    checksum: int
    spare: bool


class DiskRead(NamedTuple):
    """Disk operation: read a block from disk into a slot."""

    key: bytes
    slot: int


class DiskSpare(NamedTuple):
    """Disk operation: mark a block on disk as replaceable, because memory has a copy of the block."""

    key: bytes


class DiskForget(NamedTuple):
    """Disk operation: delete a block from disk."""

    key: bytes


DiskOperation = DiskWrite | DiskRead | DiskSpare | DiskForget


# -- requests -------------------------------------------------------------------------------------------------------


class Lookup(msgspec.Struct, frozen=True, tag=True):
    """Request to count the leading blocks of a prompt that are in the store."""

    keys: list[bytes]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Request to pin and read the cached prefix of a prompt."""

    keys: list[bytes]


class Put(msgspec.Struct, frozen=True, tag=True):
    """Request to write consecutive KV blocks to the store. The first has index `start` in its request."""

    keys: list[bytes]
    start: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Message that tells the store which blocks of a Put request the client has written."""

    blocks: list[Block]


class Release(msgspec.Struct, frozen=True, tag=True):
    """Message from a client that no longer uses the memory `slots`; None ends the whole Load or Put request."""

    slots: list[int] | None = None


class FetchBlocks(msgspec.Struct, frozen=True, tag=True):
    """Request to copy missing KV blocks of a prompt from the store at `address`, for at most `limit_s` seconds."""

    keys: list[bytes]
    address: str
    limit_s: float


StoreOperation = Lookup | Load | Put | Commit | Release | FetchBlocks


# -- results --------------------------------------------------------------------------------------------------------


class LookupResult(msgspec.Struct, frozen=True, tag=True):
    """Reply to Lookup, a request to count the leading blocks of a prompt that are in the store.

    `blocks` counts the leading blocks in memory or on disk; `in_memory` counts the leading blocks in memory alone.
    """

    blocks: int
    in_memory: int


class HeldBlocks(msgspec.Struct, frozen=True, tag=True):
    """Reply to a Load request: pinned blocks by position in the prompt. More replies follow unless it is the `last`."""

    blocks: dict[int, Block]
    last: bool


class LeasedSlots(msgspec.Struct, frozen=True, tag=True):
    """Memory slots, by block index, to which a client may write KV blocks.

    The store answers a Put request with the first slots, and each Commit with the next slots. A last reply
    without slots ends the Put request.
    """

    slots: dict[int, int]
    last: bool


class FetchResult(msgspec.Struct, frozen=True, tag=True):
    """Reply to FetchBlocks: length of the prompt's cached prefix after the fetch, in blocks."""

    blocks: int


StoreResult = LookupResult | HeldBlocks | LeasedSlots | FetchResult


# -- envelopes ------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """Registration of a client that runs as process `pid`, repeated until the store answers."""

    client: str
    pid: int


class Welcome(Message, frozen=True, kw_only=True):
    """Reply to Hello: description of the store's process and shared memory."""

    epoch: int
    pid: int
    address: str
    slots: int
    block_bytes: int


class StoreRequest(Message, frozen=True, kw_only=True):
    """Request of a client to a store. `client` is the address for replies."""

    client: str
    epoch: int
    number: int
    what: StoreOperation


class StoreReply(Message, frozen=True, kw_only=True):
    """Reply of a store to the request with this `number`."""

    epoch: int
    number: int
    what: StoreResult


ToStore = Hello | StoreRequest
ToClient = Welcome | StoreReply


MOST_KEYS = 4096
_MOST_KEY_BYTES = 64
MOST_QUESTION_BYTES = (_MOST_KEY_BYTES + 4) * MOST_KEYS + 4096
MOST_BYTES_AT_ONCE = 16 << 20  # limit of blocks per request

PeerKey = Annotated[bytes, msgspec.Meta(min_length=1, max_length=_MOST_KEY_BYTES)]
Crc32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class GetBlocks(msgspec.Struct, frozen=True, tag=True):
    """Request for blocks of another host's store. `contents` is a digest of the model and its KV layout."""

    contents: bytes
    number: int  # of the request within its connection
    keys: Annotated[list[PeerKey], msgspec.Meta(max_length=MOST_KEYS)]


class BlocksFollow(msgspec.Struct, frozen=True, tag=True):
    """Header of a reply to a GetBlocks request. KV blocks follow in the next frames of the message.

    `checksums` maps the index of a block in the request to the CRC-32 of the block.
    """

    number: int
    checksums: Annotated[dict[int, Crc32], msgspec.Meta(max_length=MOST_KEYS)]
    last: bool


def blocks_at_once(block_bytes: int) -> int:
    """Return the maximum number of blocks of `block_bytes` bytes in one request to another host's store."""
    return max(1, min(MOST_KEYS, MOST_BYTES_AT_ONCE // block_bytes))
