"""The KV cache of a peer's process on this host, mapped into ours.

A peer whose cache is divided among its ranks in another way than ours: what is moved of it from, or to, here.

Transport `shared_memory`: both instances are on one host, and the writer copies straight into leased blocks.
"""

from collections.abc import Iterator, Sequence

import torch

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool, PoolHeads, copy_all_layers, copy_blocks, copy_heads
from twofold.engine.torch.streams import PinnedMemory
from twofold.errors import ConfigurationError
from twofold.kvcache.sharding import UNSHARDED, Sharding, overlap, plan_reshard
from twofold.security.network import HostNetwork
from twofold.transport.base import SCRATCH_BYTES, Connection, MemoryDescriptor, check_layout, moved_bytes
from twofold.transport.memory import SharedMemory
from twofold.transport.pooled import PooledTransport, as_tensor

# Scratch memory as blocks, so that a probe does what a write does.
_SCRATCH_LAYOUT = KvLayout((LayerShape(1, 8 << 10, 8 << 10),), block_size=1, dtype="uint8", itemsize=1)


class MappedPool:
    """`pool` is theirs. It stays there after their end, where nobody looks at it."""

    def __init__(self, address: str, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """`device` is what copies there; raises ConfigurationError where there is no such memory."""
        nbytes = layout.pool_bytes(num_blocks)
        self._memory = SharedMemory.open(address, nbytes + SCRATCH_BYTES)
        self.pool = KvPool(layout, num_blocks, as_tensor(self._memory))
        self._pinned = PinnedMemory(self.pool.memory, device)
        self._scratch = _scratch_pool(as_tensor(self._memory)[nbytes:])
        self._own_scratch = _scratch_pool(None)

    def probe(self, nbytes: int) -> None:
        """Write `nbytes` into their scratch memory."""
        blocks = range(-(-nbytes // _SCRATCH_LAYOUT.bytes_per_block))
        copy_blocks(self._own_scratch, 0, blocks, self._scratch, blocks)

    def close(self) -> None:
        self._pinned.close()
        self._memory.close()


def _scratch_pool(memory: torch.Tensor | None) -> KvPool:
    return KvPool(_SCRATCH_LAYOUT, SCRATCH_BYTES // _SCRATCH_LAYOUT.bytes_per_block, memory)


class RankShard:
    """One rank of an instance that is split, and what it has of the whole instance's `layout`."""

    def __init__(self, split: Sharding, rank: int, layout: KvLayout) -> None:
        self.split, self.rank = split, rank
        self._first_layer = split.layers(rank, len(layout.layers)).start
        self._first_heads = [split.heads(rank, count).start for count in layout.kv_heads]

    def heads(self, pool: KvPool, layer: int, heads: range, blocks: Sequence[int]) -> PoolHeads:
        """Heads of a layer of the model in the pool of this rank."""
        first = self._first_heads[layer]
        return PoolHeads(
            pool, layer - self._first_layer, range(heads.start - first, heads.stop - first), blocks
        )


class ReshardConnection:
    """Implements `Connection` for one rank: of the layers that it is asked to move it moves what it has, or is to have.

    `ours` are the pools that its engine computes on and that peers' blocks land in.
    """

    def __init__(self, member: RankShard, ours: tuple[KvPool, KvPool], peer: MemoryDescriptor) -> None:
        """Raises ConfigurationError where a rank of the peer has no such memory."""
        self._member, self._theirs = member, dict[int, MappedPool]()
        self._engine_pool, self._landing_pool = ours
        layout, split = peer.layout, peer.split
        # What we have for a rank of theirs is what it has for us, so the plan is good for both directions.
        self._pieces = [
            (piece, RankShard(split, piece.target, layout))
            for piece in plan_reshard(member.split, split, layout.kv_heads)
            if piece.source == member.rank
        ]
        try:
            for rank in {piece.target for piece, _ in self._pieces}:
                own = layout.of_rank(split, rank)
                self._theirs[rank] = MappedPool(
                    peer.rank_addresses[rank], own, peer.num_blocks, self._engine_pool.device
                )
        except ConfigurationError:
            self.close()
            raise

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        moved = 0
        with self._engine_pool.copying():
            for ours, theirs in self._pairs(layers, self._engine_pool, source_blocks, target_blocks):
                copy_heads(ours, theirs)
                moved += self._bytes(ours)
        return moved

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        moved = 0
        for ours, theirs in self._pairs(layers, self._landing_pool, target_blocks, source_blocks):
            copy_heads(theirs, ours)
            moved += self._bytes(ours)
        return moved

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

    def _bytes(self, moved: PoolHeads) -> int:
        return len(moved.blocks) * len(moved.heads) * moved.pool.layout.head_bytes_per_block(moved.layer)


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
        _network: HostNetwork | None = None,
        split: Sharding = UNSHARDED,
        rank: int = 0,
    ) -> None:
        self._member = RankShard(split, rank, layout)
        own = layout.of_rank(split, rank)
        self._memory = SharedMemory.create(instance, own.pool_bytes(num_blocks) + SCRATCH_BYTES)
        self.landing_pool = KvPool(own, num_blocks, as_tensor(self._memory))
        on_cpu = torch.device(device).type == "cpu"
        self.engine_pool = self.landing_pool if on_cpu else KvPool(own, num_blocks, None, device=device)
        self._pinned = PinnedMemory(self.landing_pool.memory, self.engine_pool.device)
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
        if self.descriptor.split == peer.split == UNSHARDED:
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
