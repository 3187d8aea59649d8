"""Copies KV blocks between an engine's KV pool and the slots of a KV store, layer by layer."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from twofold.engine.torch.pool import KvPool, block_runs
from twofold.transport.memory import SlotMemory


class PoolCopier:
    """Copies KV blocks between the KV cache of the torch engine and the slots of a KV store."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        layout = pool.layout
        self.layers = len(layout.layers)
        sizes = [layout.layer_bytes_per_block(layer) for layer in range(self.layers)]
        # A slot contains the layers in order, each with keys before values.
        self._offsets = list(accumulate(sizes, initial=0))

    def span(self, layer: int) -> slice:
        return slice(self._offsets[layer], self._offsets[layer + 1])

    def read(self, memory: SlotMemory, layer: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._copy(memory, layer, slots, blocks, into_pool=True)

    def write(self, memory: SlotMemory, layer: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._copy(memory, layer, slots, blocks, into_pool=False)

    def _copy(
        self, memory: SlotMemory, layer: int, slots: Sequence[int], blocks: Sequence[int], *, into_pool: bool
    ) -> None:
        if not blocks:
            return
        whole = torch.frombuffer(memory.bytes, dtype=torch.uint8)
        rows, offset = whole.view(memory.count, memory.block_bytes), self._offsets[layer]
        runs = block_runs(slots, blocks)
        with self._pool.copying():
            for part in self._pool.block_rows(layer):
                columns = rows.narrow(1, offset, part.shape[1])
                offset += part.shape[1]
                for slot, block, count in runs:
                    there, here = columns.narrow(0, slot, count), part.narrow(0, block, count)
                    if into_pool:
                        here.copy_(there)
                    else:
                        there.copy_(here)
