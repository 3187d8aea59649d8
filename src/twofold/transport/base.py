"""Interface of transports, which move KV blocks from one instance's cache into another's."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, Self

import msgspec

from twofold.engine.base import KvLayout
from twofold.errors import ConfigurationError
from twofold.handoff import Lease
from twofold.kvcache.sharding import UNSHARDED, Sharding
from twofold.security.network import HostNetwork

# Size of the scratch memory of an instance, which peers may write at any time to measure the link.
SCRATCH_BYTES = 4 << 20


class MemoryDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Location of an instance's KV cache during one epoch (life of its process), which peers need for access.

    Both peers must have the same `layout`, which describes the cache of the whole instance. In a sharded instance,
    `address` belongs to the first rank and `others` to the other ranks.
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
    """Properties of the KV cache of one epoch (process life) of an instance, whose engine computes on `device`."""

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
    """Thread-safe connection to a peer's cache. Transfers raise InstanceLostError after `close` or the peer's loss."""

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Copy the given layers of local blocks into the peer's blocks; return the number of bytes copied."""

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Copy the given layers of the peer's blocks into local blocks; return the number of bytes copied."""

    def probe(self, nbytes: int) -> None:
        """Move `nbytes` (at most SCRATCH_BYTES) into the peer's scratch memory in the same way as `write`."""

    def close(self) -> None: ...


class Transport:
    """Interface of a transport, which gives peers access to the local cache and connects to the caches of peers.

    `writes_outlive_lease` is true if data of a peer may still arrive after its lease has ended, for example by RDMA.
    """

    descriptor: MemoryDescriptor
    writes_outlive_lease = False

    @abstractmethod
    def connect(self, peer: MemoryDescriptor) -> Connection:
        """Connect to a peer's cache. Raises ConfigurationError if layouts differ or the memory is unreachable."""

    def publish(self, blocks: Sequence[int]) -> None:
        """Let peers read the given blocks, which the engine has computed."""

    def add_checksums(self, layers: range, blocks: Sequence[int], sums: list[int], *, landed: bool) -> None:
        """Extend the checksum of each block in `sums` (initially 0, updated in place) by the contents of the given
        layers. `landed` selects the memory that peers write; otherwise the checksum is of the engine's own memory.
        """

    def granted(self, lease: Lease) -> None:
        """Permit the lease's peer to write the lease's blocks until `ended` is called."""

    def ended(self, lease: Lease) -> None:
        """End a lease. Afterwards, no peer writes under the lease, unless `writes_outlive_lease` is set."""

    def close(self) -> None: ...


def check_layout(ours: MemoryDescriptor, peer: MemoryDescriptor) -> None:
    """Raise ConfigurationError if the KV layouts of this instance and of a peer differ."""
    if peer.layout != ours.layout:
        raise ConfigurationError(
            f"{peer.instance} and {ours.instance} have different KV layouts (model, dtype or block size) and "
            "cannot exchange KV"
        )


def moved_bytes(layout: KvLayout, layers: range, blocks: int) -> int:
    """Return the size in bytes of the given layers of `blocks` KV blocks."""
    return blocks * sum(layout.layer_bytes_per_block(layer) for layer in layers)


class TransportAddress(msgspec.Struct, frozen=True):
    """Base class of the addresses in `MemoryDescriptor.address`. `transport` is the transport's command-line name."""

    transport: ClassVar[str]

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, address: str) -> Self:
        """Parse an address. Raises ConfigurationError if another transport created the address."""
        try:
            return msgspec.json.decode(address, type=cls)
        except msgspec.MsgspecError as error:
            name = cls.transport
            raise ConfigurationError(
                f"invalid peer address for {name}: both instances need --transport {name}"
            ) from error
