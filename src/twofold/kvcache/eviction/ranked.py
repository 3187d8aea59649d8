"""Eviction policies that rank blocks by number of uses: LFU and length-aware."""

from collections import OrderedDict
from collections.abc import Container
from heapq import heapify, heappop, heappush

from mypy_extensions import mypyc_attr

from twofold.kvcache.eviction.base import EvictionPolicy
from twofold.request import BlockKey


@mypyc_attr(allow_interpreted_subclasses=True)
class RankedEviction(EvictionPolicy):
    """Evicts a block with the lowest rank. Every hit of a block raises its rank by `step`."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._ranks: dict[BlockKey, int] = {}
        self._held: set[BlockKey] = set()
        self._queues: dict[int, OrderedDict[BlockKey, None]] = {}  # by rank: blocks that are not held, first come first
        self._heap: list[int] = []

    def add(self, key: BlockKey, rank: int) -> None:
        """Add the new block `key` with the rank `rank`."""
        self._ranks[key] = rank
        self._enter(key, rank)

    def hit(self, key: BlockKey) -> None:
        before = self._ranks[key]
        rank = self._ranks[key] = before + self._step
        if key not in self._held:
            self._leave(key, before)
            self._enter(key, rank)

    def hold(self, key: BlockKey) -> None:
        self._held.add(key)
        self._leave(key, self._ranks[key])

    def release(self, key: BlockKey) -> None:
        self._held.discard(key)
        self._enter(key, self._ranks[key])

    def forget(self, key: BlockKey) -> None:
        rank = self._ranks.pop(key)
        if key in self._held:
            self._held.discard(key)
        else:
            self._leave(key, rank)

    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        heap, queues = self._heap, self._queues
        found: BlockKey | None = None
        passed: list[int] = []  # ranks with all blocks in `keep`
        while heap:
            rank = heap[0]
            queue = queues.get(rank)
            if queue is not None:
                for key in queue:
                    if key not in keep:
                        found = key
                        break
                if found is not None:
                    break
                passed.append(rank)
            heappop(heap)
        for rank in passed:
            heappush(heap, rank)
        return found

    def _enter(self, key: BlockKey, rank: int) -> None:
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = OrderedDict()
            heappush(self._heap, rank)
            if len(self._heap) > 2 * len(self._queues) + 16:
                self._heap = list(self._queues)
                heapify(self._heap)
        queue[key] = None

    def _leave(self, key: BlockKey, rank: int) -> None:
        queue = self._queues[rank]
        del queue[key]
        if not queue:
            del self._queues[rank]


class Lfu(RankedEviction):
    """Evicts the least frequently used block."""

    help = "least frequently used since the block was stored"

    def __init__(self) -> None:
        super().__init__(step=1)  # uses since the block was stored; of several blocks, the least recently used

    def stored(self, key: BlockKey, position: int) -> None:
        self.add(key, 1)


_POSITION_BITS = 24  # a prompt has fewer than 2^24 blocks


class LengthAware(RankedEviction):
    """Evicts the least frequently used block and, among equals, the block farthest from the start of its prompt.

    This is Mooncake's LengthAwareCache (arXiv 2407.00079 section 4, Table 1).
    """

    help = "least frequently used, ends of prompts first"

    def __init__(self) -> None:
        super().__init__(step=1 << _POSITION_BITS)  # uses in the high bits, minus the position

    def stored(self, key: BlockKey, position: int) -> None:
        self.add(key, (1 << _POSITION_BITS) - position)
