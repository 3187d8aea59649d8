"""Shared memory as torch sees it.

Checksums of KV blocks, so that what arrives can be compared with what left.

Transports between caches that are pools of tensors.
"""

import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module

import torch

from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import KvPool
from twofold.handoff import Lease
from twofold.security.network import HostNetwork
from twofold.transport.base import Connection, MemoryDescriptor
from twofold.transport.memory import SharedMemory
from twofold.transport.registry import TRANSPORTS, check_transport


def as_tensor(memory: SharedMemory) -> torch.Tensor:
    """All of it as a tensor of bytes [nbytes], writable."""
    return torch.frombuffer(memory.view(), dtype=torch.uint8)


def add_checksums(pool: KvPool, layers: range, blocks: Sequence[int], sums: list[int]) -> None:
    """Go on with the checksum (CRC-32) of each block over these layers; `sums` has one entry per block, 0 at first."""
    with pool.copying():
        for layer in layers:
            for part in pool.block_rows(layer):
                rows = part.index_select(0, torch.tensor(blocks, device=part.device)).cpu().numpy()
                for place, row in enumerate(rows):
                    sums[place] = zlib.crc32(row, sums[place])


class PooledTransport:
    """Owns the local cache too.

    The engine computes on `engine_pool`; what peers write, or is read from them, lands in `landing_pool`. They are
    one and the same where the transport reaches the memory that the engine computes on.
    """

    writes_outlive_lease = False
    descriptor: MemoryDescriptor
    engine_pool: KvPool
    landing_pool: KvPool

    @abstractmethod
    def connect(self, peer: MemoryDescriptor) -> Connection: ...

    def publish(self, blocks: Sequence[int]) -> None:
        """There is nothing to do where both pools are one."""

    def add_checksums(self, layers: range, blocks: Sequence[int], sums: list[int], *, landed: bool) -> None:
        add_checksums(self.landing_pool if landed else self.engine_pool, layers, blocks, sums)

    def granted(self, lease: Lease) -> None:
        """Peers that may write may write everything, and write what they are told to."""

    def ended(self, lease: Lease) -> None:
        """The same."""

    @abstractmethod
    def close(self) -> None: ...


# (instance, epoch, layout, number of blocks, device that the engine computes on, where this host is among others)
MakeTransport = Callable[[str, int, KvLayout, int, str, HostNetwork | None], PooledTransport]


def load_transport(name: str) -> MakeTransport:
    """What makes a transport of this name; raises ConfigurationError where it is unknown or not installed."""
    check_transport(name)
    entry = TRANSPORTS[name]
    make: MakeTransport = getattr(import_module(entry.module), entry.name)
    return make
