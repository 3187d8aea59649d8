"""Transport `shared_memory`: copies KV between processes of one host through shared memory."""

from collections.abc import Iterator, Sequence

import torch

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool, PinnedMemory, PoolHeads, copy_blocks, copy_heads
from twofold.errors import ConfigurationError
from twofold.kvcache.sharding import UNSHARDED, Sharding, overlap, plan_reshard
from twofold.transport.base import SCRATCH_BYTES, Connection, KvCacheSpec, MemoryDescriptor
from twofold.transport.memory import SharedMemory
from twofold.transport.pooled import PooledTransport, as_tensor

# Layout of scratch memory as blocks, so that probes copy in the same way as writes.
_SCRATCH_LAYOUT = KvLayout((LayerShape(1, 8 << 10, 8 << 10),), block_size=1, dtype="uint8", itemsize=1)


class MappedPool:
    """A peer's KV pool, mapped into this process."""

    def __init__(self, address: str, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """Map a peer's pool. Raises ConfigurationError if the memory is missing."""
        nbytes = layout.pool_bytes(num_blocks)
        self._memory = SharedMemory.open(address, nbytes + SCRATCH_BYTES)
        self.pool = KvPool(layout, num_blocks, as_tensor(self._memory))
        self._pinned = PinnedMemory(self.pool.memory, device)
        self._scratch = _scratch_pool(as_tensor(self._memory)[nbytes:])
        self._own_scratch = _scratch_pool(None)

    def probe(self, nbytes: int) -> None:
        blocks = range(-(-nbytes // _SCRATCH_LAYOUT.bytes_per_block))
        copy_blocks(self._own_scratch, self._scratch.layers, blocks, self._scratch, blocks)

    def close(self) -> None:
        self._pinned.close()
        self._memory.close()


def _scratch_pool(memory: torch.Tensor | None) -> KvPool:
    return KvPool(_SCRATCH_LAYOUT, SCRATCH_BYTES // _SCRATCH_LAYOUT.bytes_per_block, memory)


class RankShard:
    """Layers and KV heads that one rank of a sharded instance holds."""

    def __init__(self, sharding: Sharding, rank: int, layout: KvLayout) -> None:
        self.sharding, self.rank = sharding, rank
        self._first_layer = sharding.layers(rank, len(layout.layers)).start
        self._first_heads = [sharding.heads(rank, count).start for count in layout.kv_heads]

    def heads(self, pool: KvPool, layer: int, heads: range, blocks: Sequence[int]) -> PoolHeads:
        """Translate a layer and a range of heads from indices in the whole model to indices in this rank's `pool`."""
        first = self._first_heads[layer]
        return PoolHeads(pool, layer - self._first_layer, range(heads.start - first, heads.stop - first), blocks)


class SharedMemoryConnection:
    """Connection of an instance, or of one of its ranks, to a peer that may be sharded differently."""

    def __init__(self, member: RankShard, ours: tuple[KvPool, KvPool], peer: MemoryDescriptor) -> None:
        """Map the KV caches of the peer's ranks that exchange KV with this rank. Raises ConfigurationError."""
        self._member, self._theirs = member, dict[int, MappedPool]()
        self._engine_pool, self._landing_pool = ours
        layout, sharding = peer.layout, peer.sharding
        # One plan serves both directions: a pair of ranks exchanges the same heads and layers either way.
        plan = plan_reshard(member.sharding, sharding, layout.kv_heads)
        self._pieces = [(each, RankShard(sharding, each.target, layout)) for each in plan if each.source == member.rank]
        try:
            for rank in {piece.target for piece, _ in self._pieces}:
                own = layout.of_rank(sharding, rank)
                address, device = (peer.address, *peer.others)[rank], self._engine_pool.device
                self._theirs[rank] = MappedPool(address, own, peer.num_blocks, device)
        except ConfigurationError:
            self.close()
            raise

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        with self._engine_pool.copying():
            pairs = self._pairs(layers, self._engine_pool, source_blocks, target_blocks)
            return sum(copy_heads(ours, theirs) for ours, theirs in pairs)

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        pairs = self._pairs(layers, self._landing_pool, target_blocks, source_blocks)
        return sum(copy_heads(theirs, ours) for ours, theirs in pairs)

    def probe(self, nbytes: int) -> None:
        next(iter(self._theirs.values())).probe(nbytes)

    def close(self) -> None:
        for mapped in self._theirs.values():
            mapped.close()

    def _pairs(
        self, layers: range, pool: KvPool, own_blocks: Sequence[int], their_blocks: Sequence[int]
    ) -> Iterator[tuple[PoolHeads, PoolHeads]]:
        for piece, peer in self._pieces:
            for layer in overlap(layers, piece.layers):
                yield (
                    self._member.heads(pool, layer, piece.heads, own_blocks),
                    peer.heads(self._theirs[peer.rank].pool, layer, piece.heads, their_blocks),
                )


class SharedMemoryTransport(PooledTransport):
    """Transport that copies KV blocks between processes of one host through shared memory.

    In a sharded instance, the local KV cache holds only the heads and layers of one `rank`.
    """

    def __init__(self, spec: KvCacheSpec, sharding: Sharding = UNSHARDED, rank: int = 0) -> None:
        self._member = RankShard(sharding, rank, spec.layout)
        own, num_blocks = spec.layout.of_rank(sharding, rank), spec.num_blocks
        self._memory = SharedMemory.create(spec.instance, own.pool_bytes(num_blocks) + SCRATCH_BYTES)
        self.landing_pool = KvPool(own, num_blocks, as_tensor(self._memory))
        on_cpu = torch.device(spec.device).type == "cpu"
        self.engine_pool = self.landing_pool if on_cpu else KvPool(own, num_blocks, None, device=spec.device)
        self._pinned = PinnedMemory(self.landing_pool.memory, self.engine_pool.device)
        self.descriptor = spec.descriptor(self._memory.address, sharding)

    def connect_to(self, peer: MemoryDescriptor) -> Connection:
        return SharedMemoryConnection(self._member, (self.engine_pool, self.landing_pool), peer)

    def publish(self, blocks: Sequence[int]) -> None:
        self.stage(self.engine_pool.layers, blocks)

    def stage(self, layers: range, blocks: Sequence[int]) -> None:
        """Copy blocks from an accelerator to the shared memory. On a CPU, do nothing."""
        if self.engine_pool is not self.landing_pool:
            with self.engine_pool.copying():
                copy_blocks(self.engine_pool, layers, blocks, self.landing_pool, blocks)

    def close(self) -> None:
        self._pinned.close()
        self._memory.close()
