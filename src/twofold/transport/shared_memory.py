"""Transport `shared_memory`: both instances are on one host, and the writer copies straight into leased blocks."""

from collections.abc import Sequence

from twofold.engine.torch.pool import KvPool, copy_blocks
from twofold.errors import ConfigurationError
from twofold.transport.base import Connection, MemoryDescriptor
from twofold.transport.memory import SharedMemory


class SharedMemoryConnection:
    """A peer's pool mapped into this process."""

    def __init__(self, source: KvPool, peer: MemoryDescriptor) -> None:
        self._memory = SharedMemory.open(peer.address, peer.layout.pool_bytes(peer.num_blocks))
        self._source = source
        self._target = KvPool(peer.layout, peer.num_blocks, self._memory.tensor())
        self._bytes_per_block = peer.layout.layer_bytes_per_block

    def write(self, layer: int, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        copy_blocks(self._source, layer, source_blocks, self._target, target_blocks)
        return len(source_blocks) * self._bytes_per_block(layer)

    def close(self) -> None:
        self._memory.close()


class SharedMemoryTransport:
    """Exposes `memory`, which backs the pool that peers write into, and writes from `source` into peers.

    `source` is the pool the engine computes on. On a CPU it lies in `memory` itself; an engine on an
    accelerator has its pool there and `memory` is where the blocks of its leases land.
    """

    def __init__(
        self, instance: str, epoch: int, memory: SharedMemory, source: KvPool, num_blocks: int
    ) -> None:
        self._memory = memory
        self._source = source
        self.descriptor = MemoryDescriptor(
            instance=instance,
            epoch=epoch,
            address=memory.address,
            num_blocks=num_blocks,
            layout=source.layout,
        )

    def connect(self, peer: MemoryDescriptor) -> Connection:
        if peer.layout != self._source.layout:
            raise ConfigurationError(
                f"{peer.instance} lays out its KV cache otherwise than {self.descriptor.instance} "
                "(model, dtype or block size differ), so they cannot hand requests over"
            )
        return SharedMemoryConnection(self._source, peer)

    def close(self) -> None:
        self._memory.close()
