"""The transport seam: how KV blocks get from one instance's cache into another's.

What a transport writes into `MemoryDescriptor.address`, and reads from that of a peer.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol, Self

import msgspec

from twofold.engine.base import KvLayout
from twofold.errors import ConfigurationError
from twofold.handoff import Lease
from twofold.kvcache.sharding import UNSHARDED, Sharding

# Every instance keeps this much memory that peers may write at any time, to measure the link.
SCRATCH_BYTES = 4 << 20


class MemoryDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """How peers reach the KV cache of one life of an instance.

    `epoch` names that life; `address` means something to the transport that made it. Both sides must have
    the same `layout`. Where an instance is `split`, that is of all its ranks together, `address` is how its first
    rank's part is reached, and `others` are the addresses of its other ranks.
    """

    instance: str
    epoch: int
    address: str
    num_blocks: int
    layout: KvLayout
    split: Sharding = UNSHARDED
    others: tuple[str, ...] = ()

    @property
    def rank_addresses(self) -> tuple[str, ...]:
        return (self.address, *self.others)


class Connection(Protocol):
    """A peer's cache, open for writing and reading.

    Several threads may use it, and `close` may be called while another moves something: that then ends, with
    InstanceLostError where not everything was moved. So it does when the life that the connection was made to is over.
    """

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Copy these layers of local blocks into the peer's; returns the bytes moved once the peer can see them."""
        ...

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Copy these layers of the peer's blocks into local ones; returns the bytes moved once they are here."""
        ...

    def probe(self, nbytes: int) -> None:
        """Move `nbytes` (at most SCRATCH_BYTES) into the peer's scratch memory, as `write` would."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Exposes the local cache to peers and opens theirs."""

    @property
    def descriptor(self) -> MemoryDescriptor: ...

    def connect(self, peer: MemoryDescriptor) -> Connection:
        """Raises ConfigurationError when the peer's layout differs or its memory cannot be reached."""
        ...

    def publish(self, blocks: Sequence[int]) -> None:
        """Make what the engine computed in these blocks readable for peers, if it is not."""
        ...

    def add_checksums(self, layers: range, blocks: Sequence[int], sums: list[int], *, landed: bool) -> None:
        """Go on with the checksum of each block over these layers; `sums` has one entry per block, 0 at first.

        `landed` says which contents: what peers wrote, or what the engine computed.
        """
        ...

    @property
    def writes_outlive_lease(self) -> bool:
        """Whether what a peer on another host has sent may still land here after the lease it was sent under ended.

        It may where the network's own memory writes ours and nobody here is asked.
        """
        ...

    def granted(self, lease: Lease) -> None:
        """A peer may write the blocks of this lease from now on."""
        ...

    def ended(self, lease: Lease) -> None:
        """Nothing may be written under this lease any more; returns when nothing is, unless it `lingers`."""
        ...

    def close(self) -> None: ...


def check_layout(ours: MemoryDescriptor, peer: MemoryDescriptor) -> None:
    """Raises ConfigurationError when a peer's bytes would mean something else here."""
    if peer.layout != ours.layout:
        raise ConfigurationError(
            f"{peer.instance} lays out its KV cache otherwise than {ours.instance} "
            "(model, dtype or block size differ), so they cannot hand requests over"
        )


def moved_bytes(layout: KvLayout, layers: range, blocks: int) -> int:
    """Bytes of `blocks` blocks of these layers."""
    return blocks * sum(layout.layer_bytes_per_block(layer) for layer in layers)


class TransportAddress(msgspec.Struct, frozen=True):
    """Root of those that are more than a name; `transport` is what the command line calls theirs."""

    transport: ClassVar[str]

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, address: str) -> Self:
        """Raises ConfigurationError for what another transport wrote."""
        try:
            return msgspec.json.decode(address, type=cls)
        except msgspec.MsgspecError as error:
            name = cls.transport
            raise ConfigurationError(
                f"a peer's address is not one of {name}'s: both need --transport {name}"
            ) from error
