"""Leased blocks that land beside the engine's pool, because that lies on an accelerator."""

from collections.abc import Sequence

from twofold.engine.torch.pool import KvPool, copy_all_layers
from twofold.serving.worker.landing import Landing


class PoolLanding(Landing):
    """Brings landed blocks from the memory that peers write into the pool that the engine computes on."""

    def __init__(self, landing_pool: KvPool, engine_pool: KvPool) -> None:
        self._landing_pool = landing_pool
        self._engine_pool = engine_pool
        self._waiting: list[tuple[str, Sequence[int]]] = []

    def landed(self, request_id: str, blocks: Sequence[int]) -> None:
        self._waiting.append((request_id, tuple(blocks)))

    def take(self) -> list[Sequence[int]]:
        waiting, self._waiting = self._waiting, []
        return [blocks for _, blocks in waiting]

    def drop(self, request_id: str) -> None:
        self._waiting = [(rid, blocks) for rid, blocks in self._waiting if rid != request_id]

    def bring(self, block_lists: Sequence[Sequence[int]]) -> None:
        for blocks in block_lists:
            copy_all_layers(self._landing_pool, self._engine_pool, blocks)
