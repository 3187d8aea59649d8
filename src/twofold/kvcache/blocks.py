"""Block accounts that know each block of a paged KV cache by its number."""

from collections.abc import Sequence
from heapq import heappop, heappush

from twofold.kvcache.accounts import BlockAccounts, Grant


class BlockManager(BlockAccounts):
    """`BlockAccounts` for a live worker: hands out the blocks 0 … num_blocks − 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        # A heap: the lowest ids go first, so that blocks of a request are neighbours as often as can be (engines and
        # transports are faster on runs), and equal sets of free blocks give equal allocations.
        self._free_ids = list(range(num_blocks))
        self._held: dict[Grant, list[int]] = {}

    def blocks_of(self, grant: Grant) -> Sequence[int]:
        return self._held[grant]

    def _give(self, grant: Grant, blocks: int) -> None:
        self._held.setdefault(grant, []).extend(heappop(self._free_ids) for _ in range(blocks))

    def _take_back(self, grant: Grant) -> None:
        for block in self._held.pop(grant):
            heappush(self._free_ids, block)
