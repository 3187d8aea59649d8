"""Where leased blocks land: in the engine's own pool, or beside it when that lies on an accelerator."""

from collections.abc import Sequence

from twofold.engine.torch.pool import KvPool, copy_blocks


class Landing:
    """Brings landed blocks from the memory that peers write into the pool that the engine computes on.

    On a CPU both are the same memory and there is nothing to bring.
    """

    def __init__(self, landing_pool: KvPool, engine_pool: KvPool) -> None:
        self._landing_pool = landing_pool
        self._engine_pool = engine_pool
        self._waiting: list[tuple[str, Sequence[int]]] = []

    def landed(self, request_id: str, blocks: Sequence[int]) -> None:
        """These blocks are complete; they are brought over before the next batch."""
        if self._landing_pool is not self._engine_pool:
            self._waiting.append((request_id, tuple(blocks)))

    def take(self) -> list[Sequence[int]]:
        """The blocks to bring over now; to be called where `landed` is."""
        waiting, self._waiting = self._waiting, []
        return [blocks for _, blocks in waiting]

    def drop(self, request_id: str) -> None:
        """The request is over: its blocks may be given to another."""
        self._waiting = [(rid, blocks) for rid, blocks in self._waiting if rid != request_id]

    def bring(self, block_lists: Sequence[Sequence[int]]) -> None:
        """Copy all layers of these blocks; to be called by the thread that runs the engine."""
        for blocks in block_lists:
            for layer in range(len(self._engine_pool.layout.layers)):
                copy_blocks(self._landing_pool, layer, blocks, self._engine_pool, blocks)
