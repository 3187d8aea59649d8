"""The interface of transports, which move KV blocks from one instance's cache into another's."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, Self

import msgspec

from twofold.engine.base import KvLayout
from twofold.errors import ConfigurationError
from twofold.handoff import Lease
from twofold.kvcache.sharding import UNSHARDED, Sharding
from twofold.security.network import HostNetwork

# Memory of every instance that peers may write at any time, to measure the link.
SCRATCH_BYTES = 4 << 20


class MemoryDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Location of the KV cache of one epoch of an instance, for peers.

    Only the transport that created `address` can read it. Both sides must have the same `layout`, which is that of the
    whole instance. With `sharding`, `address` belongs to the first rank and `others` to the other ranks.
    """

    instance: str
    epoch: int
    address: str
    num_blocks: int
    layout: KvLayout
    sharding: Sharding = UNSHARDED
    others: tuple[str, ...] = ()

    @property
    def rank_addresses(self) -> tuple[str, ...]:
        return (self.address, *self.others)


class KvCacheSpec(NamedTuple):
    """The KV cache of one epoch of an instance, to be created for an engine on `device`."""

    instance: str
    epoch: int
    layout: KvLayout
    num_blocks: int
    device: str = "cpu"
    network: HostNetwork | None = None  # of a service over several hosts

    def descriptor(self, address: str, sharding: Sharding = UNSHARDED) -> MemoryDescriptor:
        return MemoryDescriptor(
            instance=self.instance,
            epoch=self.epoch,
            address=address,
            num_blocks=self.num_blocks,
            layout=self.layout,
            sharding=sharding,
        )


class Connection(Protocol):
    """A peer's cache, open for writing and reading. Methods are thread-safe.

    `close` ends running moves with InstanceLostError, and so does the end of the peer's epoch.
    """

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Copy these layers of local blocks to the peer; returns the bytes moved once the peer can see them."""

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Copy these layers of the peer's blocks into local ones; returns the bytes moved."""

    def probe(self, nbytes: int) -> None:
        """Move `nbytes` (at most SCRATCH_BYTES) into the peer's scratch memory in the same way as `write`."""

    def close(self) -> None: ...


class Transport:
    """Exposes the local cache to peers and opens theirs.

    `writes_outlive_lease` is true if data that a remote peer sent may still arrive after its lease ended, because the
    network writes into memory without asking this process.
    """

    descriptor: MemoryDescriptor
    writes_outlive_lease = False

    @abstractmethod
    def connect(self, peer: MemoryDescriptor) -> Connection:
        """Open a peer's cache. Raises ConfigurationError if its layout differs or its memory is unreachable."""

    def publish(self, blocks: Sequence[int]) -> None:
        """Make computed blocks readable for peers."""

    def add_checksums(self, layers: range, blocks: Sequence[int], sums: list[int], *, landed: bool) -> None:
        """Extend the checksum of each block by these layers; `sums` has one entry per block, initially 0.

        With `landed`, they cover the contents that peers wrote, otherwise the contents that the engine computed.
        """

    def granted(self, lease: Lease) -> None:
        """A peer may write the blocks of this lease from now on."""

    def ended(self, lease: Lease) -> None:
        """End a lease. No write under it happens after this returns, unless `writes_outlive_lease`."""

    def close(self) -> None: ...


def check_layout(ours: MemoryDescriptor, peer: MemoryDescriptor) -> None:
    """Raise ConfigurationError if a peer's KV layout differs."""
    if peer.layout != ours.layout:
        raise ConfigurationError(
            f"{peer.instance} and {ours.instance} have different KV layouts (model, dtype or block size) and "
            "cannot exchange KV"
        )


def moved_bytes(layout: KvLayout, layers: range, blocks: int) -> int:
    """Bytes of `blocks` blocks of these layers."""
    return blocks * sum(layout.layer_bytes_per_block(layer) for layer in layers)


class TransportAddress(msgspec.Struct, frozen=True):
    """Base of structured addresses in `MemoryDescriptor.address`; `transport` is the name on the command line."""

    transport: ClassVar[str]

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, address: str) -> Self:
        """Parse an address. Raises ConfigurationError for one of another transport."""
        try:
            return msgspec.json.decode(address, type=cls)
        except msgspec.MsgspecError as error:
            name = cls.transport
            raise ConfigurationError(
                f"invalid peer address for {name}: both instances need --transport {name}"
            ) from error
