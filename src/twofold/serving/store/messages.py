"""Messages between a store, its clients and the stores of other hosts. A client registers with Hello, which the store
answers with Welcome, and sends StoreRequests, which the store answers with StoreReplies. Slots belong to a client until
it releases them or dies. A store sends GetBlocks to another host's store, which answers with BlocksFollow as blocks
become available in its memory.
"""

from typing import Annotated, NamedTuple

import msgspec

from twofold.serving.messages import Message


class Block(NamedTuple):
    """Slot of the store's memory, and the CRC-32 of the block in it (0 until the block is written)."""

    slot: int
    checksum: int


# -- operations on the disk -----------------------------------------------------------------------------------------


class DiskWrite(NamedTuple):
    """Disk operation: write a slot to disk as block `position` of its prompt, unless the block is there already. With
    `spare`, also mark the block as replaceable, as `DiskSpare` does.
    """

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
    """Disk operation: mark a block as replaceable when the disk needs space, because memory has the block too."""

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
    """Request to pin the leading blocks of a prompt that are in the store, until the client releases them."""

    keys: list[bytes]


class Put(msgspec.Struct, frozen=True, tag=True):
    """Request for slots in which to write the missing blocks of a prompt, from index `start` on."""

    keys: list[bytes]
    start: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Notice that `blocks` of a Put request are written. The store frees the unfilled slots and leases new slots."""

    blocks: list[Block]


class Release(msgspec.Struct, frozen=True, tag=True):
    """Request to unpin `slots` of a Load request. None ends the whole Load or Put request."""

    slots: list[int] | None = None


class FetchBlocks(msgspec.Struct, frozen=True, tag=True):
    """Request to fetch missing blocks of these keys from another host's store at `address` within `limit_s` seconds."""

    keys: list[bytes]
    address: str
    limit_s: float


StoreOperation = Lookup | Load | Put | Commit | Release | FetchBlocks


# -- results --------------------------------------------------------------------------------------------------------


class LookupResult(msgspec.Struct, frozen=True, tag=True):
    """Reply to a Lookup: the number of leading blocks in the store (`blocks`), and in memory alone (`in_memory`)."""

    blocks: int
    in_memory: int


class HeldBlocks(msgspec.Struct, frozen=True, tag=True):
    """One of the replies to a Load: newly pinned blocks, by index in the prompt. `last` marks the final reply."""

    blocks: dict[int, Block]
    last: bool


class LeasedSlots(msgspec.Struct, frozen=True, tag=True):
    """Reply to a Put or Commit: slots to fill, by block index in the prompt. The `last` reply has no slots."""

    slots: dict[int, int]
    last: bool


class FetchResult(msgspec.Struct, frozen=True, tag=True):
    """Reply to FetchBlocks after the end of the fetch: the number of leading blocks now in the store."""

    blocks: int


StoreResult = LookupResult | HeldBlocks | LeasedSlots | FetchResult


# -- envelopes ------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """Registration of a client that runs as process `pid`, repeated until the store answers."""

    client: str
    pid: int


class Welcome(Message, frozen=True, kw_only=True):
    """Reply to Hello: the store's epoch, which ends with process `pid`, and its memory of `slots` slots with
    `block_bytes` bytes each.
    """

    epoch: int
    pid: int
    address: str
    slots: int
    block_bytes: int


class StoreRequest(Message, frozen=True, kw_only=True):
    """Request to one epoch (life) of a store. `client` is the inbox for replies; `number` identifies the request."""

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
    """Request to another host's store for the leading blocks of `keys`. `contents` is a digest of the requester's model
    and KV layout, and `number` identifies the request within its connection.
    """

    contents: bytes
    number: int
    keys: Annotated[list[PeerKey], msgspec.Meta(max_length=MOST_KEYS)]


class BlocksFollow(msgspec.Struct, frozen=True, tag=True):
    """Reply to the GetBlocks request `number` with some of the blocks. `checksums` maps indices in the request to
    CRC-32s. The attached frames contain the blocks in the same order. `last` marks the final reply.
    """

    number: int
    checksums: Annotated[dict[int, Crc32], msgspec.Meta(max_length=MOST_KEYS)]
    last: bool


def blocks_at_once(block_bytes: int) -> int:
    """Return the maximum number of blocks of `block_bytes` bytes in one request to another host's store."""
    return max(1, min(MOST_KEYS, MOST_BYTES_AT_ONCE // block_bytes))
