"""Transport `shared_memory`: both instances are on one host, and the writer copies straight into leased blocks."""

from collections.abc import Sequence

import torch

from twofold.curve.network import Network
from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool, copy_blocks
from twofold.transport.base import SCRATCH_BYTES, Connection, MemoryDescriptor, check_layout, moved_bytes
from twofold.transport.memory import SharedMemory
from twofold.transport.pooled import PooledTransport

# Scratch memory as blocks, so that a probe does what a write does.
_SCRATCH_LAYOUT = KvLayout((LayerShape(1, 8 << 10, 8 << 10),), block_size=1, dtype="uint8", itemsize=1)


class SharedMemoryConnection:
    """A peer's memory mapped into this process. It stays there after the peer's end, where nobody looks at it."""

    def __init__(self, engine_pool: KvPool, landing_pool: KvPool, peer: MemoryDescriptor) -> None:
        nbytes = peer.layout.pool_bytes(peer.num_blocks)
        self._memory = SharedMemory.open(peer.address, nbytes + SCRATCH_BYTES)
        self._engine_pool, self._landing_pool = engine_pool, landing_pool
        self._peer = KvPool(peer.layout, peer.num_blocks, self._memory.tensor())
        self._scratch = _scratch_pool(self._memory.tensor()[nbytes:])
        self._own_scratch = _scratch_pool(None)

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        return _copy(self._engine_pool, self._peer, layers, source_blocks, target_blocks)

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        return _copy(self._peer, self._landing_pool, layers, source_blocks, target_blocks)

    def probe(self, nbytes: int) -> None:
        blocks = range(-(-nbytes // _SCRATCH_LAYOUT.bytes_per_block))
        copy_blocks(self._own_scratch, 0, blocks, self._scratch, blocks)

    def close(self) -> None:
        self._memory.close()


class SharedMemoryTransport(PooledTransport):
    """The local cache in memory that peers on this host map.

    On a CPU the engine computes in that memory; on an accelerator it has a pool of its own, and the shared memory
    is where the blocks of its leases land and where its peers read.
    """

    def __init__(
        self,
        instance: str,
        epoch: int,
        layout: KvLayout,
        num_blocks: int,
        device: str,
        _network: Network | None = None,
    ) -> None:
        nbytes = layout.pool_bytes(num_blocks)
        self._memory = SharedMemory.create(instance, nbytes + SCRATCH_BYTES)
        self.landing_pool = KvPool(layout, num_blocks, self._memory.tensor())
        on_cpu = torch.device(device).type == "cpu"
        self.engine_pool = self.landing_pool if on_cpu else KvPool(layout, num_blocks, None, device=device)
        self.descriptor = MemoryDescriptor(
            instance=instance, epoch=epoch, address=self._memory.address, num_blocks=num_blocks, layout=layout
        )

    def connect(self, peer: MemoryDescriptor) -> Connection:
        check_layout(self.descriptor, peer)
        return SharedMemoryConnection(self.engine_pool, self.landing_pool, peer)

    def publish(self, blocks: Sequence[int]) -> None:
        if self.engine_pool is not self.landing_pool:
            layers = range(len(self.engine_pool.layout.layers))
            _copy(self.engine_pool, self.landing_pool, layers, blocks, blocks)

    def close(self) -> None:
        self._memory.close()


def _scratch_pool(memory: torch.Tensor | None) -> KvPool:
    return KvPool(_SCRATCH_LAYOUT, SCRATCH_BYTES // _SCRATCH_LAYOUT.bytes_per_block, memory)


def _copy(
    source: KvPool, target: KvPool, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]
) -> int:
    for layer in layers:
        copy_blocks(source, layer, source_blocks, target, target_blocks)
    return moved_bytes(source.layout, layers, len(source_blocks))
