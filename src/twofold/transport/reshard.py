"""A peer whose cache is divided among its ranks in another way than ours: what is moved of it from, or to, here."""

from collections.abc import Iterator, Sequence

from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import Heads, KvPool, copy_heads
from twofold.errors import ConfigurationError
from twofold.kvcache.reshard import overlap, plan_reshard
from twofold.kvcache.split import Split
from twofold.transport.base import MemoryDescriptor
from twofold.transport.mapped import MappedPool


class Member:
    """One rank of an instance that is split, and what it has of the whole instance's `layout`."""

    def __init__(self, split: Split, rank: int, layout: KvLayout) -> None:
        self.split, self.rank = split, rank
        self._first_layer = split.layers(rank, len(layout.layers)).start
        self._first_heads = [split.heads(rank, count).start for count in layout.kv_heads]

    def heads(self, pool: KvPool, layer: int, heads: range, blocks: Sequence[int]) -> Heads:
        """Heads of a layer of the model in the pool of this rank."""
        first = self._first_heads[layer]
        return Heads(pool, layer - self._first_layer, range(heads.start - first, heads.stop - first), blocks)


class ReshardConnection:
    """Implements `Connection` for one rank: of the layers that it is asked to move it moves what it has, or is to have.

    `ours` are the pools that its engine computes on and that peers' blocks land in.
    """

    def __init__(self, member: Member, ours: tuple[KvPool, KvPool], peer: MemoryDescriptor) -> None:
        """Raises ConfigurationError where a rank of the peer has no such memory."""
        self._member, self._theirs = member, dict[int, MappedPool]()
        self._engine_pool, self._landing_pool = ours
        layout, split = peer.layout, peer.split
        # What we have for a rank of theirs is what it has for us, so the plan is good for both directions.
        self._pieces = [
            (piece, Member(split, piece.target, layout))
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
    ) -> Iterator[tuple[Heads, Heads]]:
        for piece, peer in self._pieces:
            for layer in overlap(layers, piece.layers):
                yield (
                    self._member.heads(pool, layer, piece.heads, own_blocks),
                    peer.heads(self._theirs[peer.rank].pool, layer, piece.heads, their_blocks),
                )

    def _bytes(self, moved: Heads) -> int:
        return len(moved.blocks) * len(moved.heads) * moved.pool.layout.head_bytes_per_block(moved.layer)
