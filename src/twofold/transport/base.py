"""Interface of transports, which move KV blocks between the caches of instances."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, Self

import msgspec

from twofold.engine.base import KvLayout
from twofold.errors import ConfigurationError, require
from twofold.handoff import Lease
from twofold.kvcache.sharding import UNSHARDED, Sharding
from twofold.security.network import HostNetwork

# Size of the scratch memory of an instance, which peers may write at any time to measure the link.
SCRATCH_BYTES = 4 << 20


class MemoryDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Address and layout of an instance's KV cache, valid until the instance restarts.

    If the KV cache is sharded, `address` is the address of the first rank, and `others` has the addresses of
    the remaining ranks.
    """

    instance: str
    epoch: int
    address: str
    num_blocks: int
    layout: KvLayout
    sharding: Sharding = UNSHARDED
    others: tuple[str, ...] = ()


class KvCacheSpec(NamedTuple):
    """Size, layout and device of an instance's KV cache."""

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
    """Thread-safe connection to a peer's cache. Transfers raise InstanceLostError if the peer is lost."""

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Copy the given layers from local blocks to the peer's blocks; return the number of bytes copied."""

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Copy the given layers from the peer's blocks to local blocks; return the number of bytes copied."""

    def probe(self, nbytes: int) -> None:
        """Send `nbytes` (at most SCRATCH_BYTES) to the peer, to measure the link."""

    def close(self) -> None: ...


class Transport:
    """Interface of a transport, which connects the local KV cache to the KV caches of peers.

    If `writes_outlive_lease` is true, as with RDMA, data of a peer may still arrive after the peer's lease has ended.
    """

    descriptor: MemoryDescriptor
    writes_outlive_lease = False

    def connect(self, peer: MemoryDescriptor) -> Connection:
        """Connect to a peer's cache. Raises ConfigurationError if layouts differ or the memory is unreachable."""
        ours = self.descriptor
        require(
            peer.layout == ours.layout,
            f"{peer.instance} and {ours.instance} have different KV layouts (model, dtype or block size) and "
            "cannot exchange KV",
        )
        return self.connect_to(peer)

    @abstractmethod
    def connect_to(self, peer: MemoryDescriptor) -> Connection:
        """Connect to a peer's cache with the same layout."""

    def publish(self, blocks: Sequence[int]) -> None:
        """Let peers read the given blocks."""

    def add_checksums(self, layers: range, blocks: Sequence[int], sums: list[int], *, landed: bool) -> None:
        """Update `sums`, the running checksum of each block, with the block's contents in the given layers.

        If `landed` is true, reads the memory in which KV of peers arrives; otherwise reads the KV cache of the engine.
        """

    def granted(self, lease: Lease) -> None:
        """Let a peer write into the KV blocks that `lease` reserves for the peer."""

    def ended(self, lease: Lease) -> None:
        """Revoke a peer's permission to write the blocks of a lease."""

    def close(self) -> None: ...


class TransportAddress(msgspec.Struct, frozen=True):
    """Base class of addresses of KV caches. `transport` is the name of the transport on the command line."""

    transport: ClassVar[str]

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, address: str) -> Self:
        """Parse an address. Raises ConfigurationError for an address of another transport."""
        try:
            return msgspec.json.decode(address, type=cls)
        except msgspec.MsgspecError as error:
            name = cls.transport
            raise ConfigurationError(
                f"invalid peer address for {name}: both instances need --transport {name}"
            ) from error
