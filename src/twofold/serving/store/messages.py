"""Messages between a store, its clients and the stores of other hosts.

client                                   store
  │ Hello ───────────────────────────────▶ │
  │ ◀───────────────────────────── Welcome │
  │ StoreRequest: Lookup, Load, Put, … ──▶ │
  │ ◀── StoreReply: LookupResult, …        │  slots belong to the client until it releases them or dies
  │ StoreRequest: Release, Commit ───────▶ │

fetching store                            serving store
  │ GetBlocks: keys ────────────────────────▶ │
  │ ◀─ BlocksFollow: checksums, one frame of  │  as blocks become available in memory
  │                  bytes for each block     │

Messages between hosts are validated: see `MOST_KEYS` and `PeerKey`.
"""

from typing import Annotated, NamedTuple

import msgspec

from twofold.serving.messages import Message


class Block(NamedTuple):
    """A slot and the CRC-32 of its block (meaningless before the block is written)."""

    slot: int
    checksum: int


# -- operations on the disk -----------------------------------------------------------------------------------------


class DiskWrite(NamedTuple):
    """Write a slot to disk as block `position` of its prompt, unless the disk already has it.

    With `spare`, mark it as in `DiskSpare`.
    """

    key: bytes
    position: int
    slot: int
    checksum: int
    spare: bool


class DiskRead(NamedTuple):
    """Read a block into a slot."""

    key: bytes
    slot: int


class DiskSpare(NamedTuple):
    """The memory also has this block: the disk may replace it when it needs room."""

    key: bytes


class DiskForget(NamedTuple):
    """Delete a block."""

    key: bytes


DiskOperation = DiskWrite | DiskRead | DiskSpare | DiskForget


# -- requests -------------------------------------------------------------------------------------------------------


class Lookup(msgspec.Struct, frozen=True, tag=True):
    """Count the leading blocks in the store."""

    keys: list[bytes]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Hold the leading blocks in the store until they are released."""

    keys: list[bytes]


class Put(msgspec.Struct, frozen=True, tag=True):
    """Lease slots for the missing blocks of a prompt from index `start` on."""

    keys: list[bytes]
    start: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """These blocks of a Put are complete. The other slots of the Put are returned, and the next ones are leased."""

    blocks: list[Block]


class Release(msgspec.Struct, frozen=True, tag=True):
    """Release these slots of a Load. With None, end a Load or Put with everything still pending."""

    slots: list[int] | None = None


class FetchBlocks(msgspec.Struct, frozen=True, tag=True):
    """Fetch the missing blocks of these keys from another host's store at `address`, within `limit_s`."""

    keys: list[bytes]
    address: str
    limit_s: float


StoreOperation = Lookup | Load | Put | Commit | Release | FetchBlocks


# -- results --------------------------------------------------------------------------------------------------------


class LookupResult(msgspec.Struct, frozen=True, tag=True):
    """Number of leading blocks, the first `in_memory` of which are in memory."""

    blocks: int
    in_memory: int


class HeldBlocks(msgspec.Struct, frozen=True, tag=True):
    """More blocks of a Load by their index. `last` marks the end of the Load."""

    blocks: dict[int, Block]
    last: bool


class LeasedSlots(msgspec.Struct, frozen=True, tag=True):
    """Slots to fill by block index in the Put. The next ones follow a Commit; the `last` message has none."""

    slots: dict[int, int]
    last: bool


class FetchResult(msgspec.Struct, frozen=True, tag=True):
    """A fetch has ended with this many leading blocks in the store."""

    blocks: int


StoreResult = LookupResult | HeldBlocks | LeasedSlots | FetchResult


# -- envelopes ------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """Registers a client, running as process `pid`; repeated until answered."""

    client: str
    pid: int


class Welcome(Message, frozen=True, kw_only=True):
    """Memory of this epoch of the store.

    `slots` contiguous slots of `block_bytes` bytes. The epoch ends with process `pid`.
    """

    epoch: int
    pid: int
    address: str
    slots: int
    block_bytes: int


class StoreRequest(Message, frozen=True, kw_only=True):
    """A request to one epoch of the store; `client` is the inbox for replies and `number` identifies the request."""

    client: str
    epoch: int
    number: int
    what: StoreOperation


class StoreReply(Message, frozen=True, kw_only=True):
    """Reply to request `number`."""

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
    """Request the leading blocks of these keys. `contents` identifies the requester's model and KV layout.

    `number` identifies the request within its connection.
    """

    contents: bytes
    number: int
    keys: Annotated[list[PeerKey], msgspec.Meta(max_length=MOST_KEYS)]


class BlocksFollow(msgspec.Struct, frozen=True, tag=True):
    """More blocks of request `number`.

    CRC-32 by block index, in the order of the attached frames. `last` ends the reply.
    """

    number: int
    checksums: Annotated[dict[int, Crc32], msgspec.Meta(max_length=MOST_KEYS)]
    last: bool


def blocks_at_once(block_bytes: int) -> int:
    """Maximum number of blocks per request."""
    return max(1, min(MOST_KEYS, MOST_BYTES_AT_ONCE // block_bytes))
