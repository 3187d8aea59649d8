"""Transport `shared_memory`: both instances are on one host, and the writer copies straight into leased blocks."""

from collections.abc import Sequence

import torch

from twofold.curve.network import Network
from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import KvPool, copy_all_layers, copy_blocks
from twofold.engine.torch.streams import Pinned
from twofold.kvcache.split import UNSPLIT, Split
from twofold.transport.base import SCRATCH_BYTES, Connection, MemoryDescriptor, check_layout, moved_bytes
from twofold.transport.mapped import MappedPool
from twofold.transport.memory import SharedMemory
from twofold.transport.pooled import PooledTransport
from twofold.transport.reshard import Member, ReshardConnection
from twofold.transport.tensors import as_tensor


class SharedMemoryConnection:
    """A peer's memory mapped into this process, where both sides lay it out alike."""

    def __init__(self, engine_pool: KvPool, landing_pool: KvPool, peer: MemoryDescriptor) -> None:
        self._engine_pool, self._landing_pool = engine_pool, landing_pool
        self._peer = MappedPool(peer.address, peer.layout, peer.num_blocks, engine_pool.device)

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        with self._engine_pool.copying():
            return _copy(self._engine_pool, self._peer.pool, layers, source_blocks, target_blocks)

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        return _copy(self._peer.pool, self._landing_pool, layers, source_blocks, target_blocks)

    def probe(self, nbytes: int) -> None:
        self._peer.probe(nbytes)

    def close(self) -> None:
        self._peer.close()


class SharedMemoryTransport(PooledTransport):
    """The local cache in memory that peers on this host map.

    On a CPU the engine computes in that memory; on an accelerator it has a pool of its own, and the shared memory
    is where the blocks of its leases land and where its peers read. Where the instance is split, this is the cache of
    one `rank`, and `layout` that of all of them.
    """

    def __init__(
        self,
        instance: str,
        epoch: int,
        layout: KvLayout,
        num_blocks: int,
        device: str,
        _network: Network | None = None,
        split: Split = UNSPLIT,
        rank: int = 0,
    ) -> None:
        self._member = Member(split, rank, layout)
        own = layout.of_rank(split, rank)
        self._memory = SharedMemory.create(instance, own.pool_bytes(num_blocks) + SCRATCH_BYTES)
        self.landing_pool = KvPool(own, num_blocks, as_tensor(self._memory))
        on_cpu = torch.device(device).type == "cpu"
        self.engine_pool = self.landing_pool if on_cpu else KvPool(own, num_blocks, None, device=device)
        self._pinned = Pinned(self.landing_pool.memory, self.engine_pool.device)
        self.descriptor = MemoryDescriptor(
            instance=instance,
            epoch=epoch,
            address=self._memory.address,
            num_blocks=num_blocks,
            layout=layout,
            split=split,
        )

    def connect(self, peer: MemoryDescriptor) -> Connection:
        check_layout(self.descriptor, peer)
        if self.descriptor.split == peer.split == UNSPLIT:
            return SharedMemoryConnection(self.engine_pool, self.landing_pool, peer)
        return ReshardConnection(self._member, (self.engine_pool, self.landing_pool), peer)

    def publish(self, blocks: Sequence[int]) -> None:
        if self.engine_pool is not self.landing_pool:
            with self.engine_pool.copying():
                copy_all_layers(self.engine_pool, self.landing_pool, blocks)

    def close(self) -> None:
        self._pinned.close()
        self._memory.close()


def _copy(
    source: KvPool, target: KvPool, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]
) -> int:
    for layer in layers:
        copy_blocks(source, layer, source_blocks, target, target_blocks)
    return moved_bytes(source.layout, layers, len(source_blocks))
