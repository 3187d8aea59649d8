"""The transport seam: how KV blocks get from one instance's cache into another's."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from twofold.engine.base import KvLayout


class MemoryDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """How peers reach the KV cache of one life of an instance.

    `epoch` names that life; `address` means something to the transport that made it. Both sides must have
    the same `layout`.
    """

    instance: str
    epoch: int
    address: str
    num_blocks: int
    layout: KvLayout


class Connection(Protocol):
    """A peer's cache, open for writing."""

    def write(self, layer: int, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Copy one layer of local blocks into the peer's; returns the bytes moved once the peer can see them."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Exposes the local cache to peers and opens theirs."""

    @property
    def descriptor(self) -> MemoryDescriptor: ...

    def connect(self, peer: MemoryDescriptor) -> Connection:
        """Raises ConfigurationError when the peer's layout differs or its memory cannot be reached."""
        ...

    def close(self) -> None: ...
