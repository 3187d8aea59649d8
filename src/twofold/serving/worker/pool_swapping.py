"""Sequences that are swapped out of the pool that an engine computes on, and back."""

from collections.abc import Sequence

from twofold.engine.torch.pool import KvPool, copy_blocks
from twofold.scheduling.growth import Copy


class PoolSwapSpace:
    """Implements `SwapSpace` with a pool in the memory of the host, which is taken bit by bit, as it is used."""

    def __init__(self, engine_pool: KvPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._engine_pool = engine_pool
        self._host_pool = KvPool(engine_pool.layout, num_blocks)

    def copy(self, copies: Sequence[Copy]) -> None:
        here, there = self._engine_pool, self._host_pool
        for copy in copies:
            for layer in range(len(here.layout.layers)):
                if copy.out:
                    copy_blocks(here, layer, copy.device_blocks, there, copy.host_blocks)
                else:
                    copy_blocks(there, layer, copy.host_blocks, here, copy.device_blocks)
