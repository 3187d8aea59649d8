"""Leased blocks of a split worker on accelerators: they land beside the pool of each of its ranks."""

from collections.abc import Sequence

from twofold.engine.torch.pool import KvPool
from twofold.serving.worker.pool_landing import PoolLanding
from twofold.transport.split import Bring, OtherRanks


class SplitLanding(PoolLanding):
    """Lets the other ranks bring their parts as well; the pools are those of the first."""

    def __init__(self, landing_pool: KvPool, engine_pool: KvPool, ranks: OtherRanks) -> None:
        super().__init__(landing_pool, engine_pool)
        self._ranks = ranks

    def bring(self, block_lists: Sequence[Sequence[int]]) -> None:
        if block_lists:
            self._ranks.ask(Bring(block_lists))
            super().bring(block_lists)
