"""The eviction seam: which block leaves a full memory first?"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container
from heapq import heapify, heappop, heappush
from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.request import BlockKey


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy(ABC):
    """Ranks the blocks of one memory that are not held.

    The memory reports each event once: `stored`, every `hit`, `hold` and `release` in turn, and `forget` when the
    block is gone, held or not. No operation takes longer when the memory has more blocks.
    """

    help: ClassVar[str] = ""  # one line for command-line help

    @abstractmethod
    def stored(self, key: BlockKey, position: int) -> None:
        """A block was added; `position` is its index in its prompt."""

    @abstractmethod
    def hit(self, key: BlockKey) -> None:
        """A request reused the block, which may be held."""

    @abstractmethod
    def hold(self, key: BlockKey) -> None:
        """The block must not be evicted."""

    @abstractmethod
    def release(self, key: BlockKey) -> None:
        """The block may be evicted again. It was in use until now."""

    @abstractmethod
    def forget(self, key: BlockKey) -> None:
        """The block was removed."""

    @abstractmethod
    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        """The next block to evict that is not in `keep`, or None. It stays until `forget`.

        The time grows with the number of blocks in `keep` only.
        """


class Ranking:
    """Blocks by rank, lowest first. Blocks of equal rank are ordered by when they got it.

    Each rank has its own queue. The heap contains every rank that has a queue, and some empty ones, which are skipped
    and swept out once they are the majority.
    """

    __slots__ = ("_heap", "_queues", "_ranks")

    def __init__(self) -> None:
        self._ranks: dict[BlockKey, int] = {}
        self._queues: dict[int, OrderedDict[BlockKey, None]] = {}
        self._heap: list[int] = []

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._ranks

    def put(self, key: BlockKey, rank: int) -> None:
        """Add a new block behind the others of its rank."""
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = OrderedDict()
            self._add_rank(rank)
        queue[key] = None
        self._ranks[key] = rank

    def drop(self, key: BlockKey) -> None:
        """Remove a block, if present."""
        rank = self._ranks.pop(key, None)
        if rank is None:
            return
        queue = self._queues[rank]
        del queue[key]
        if not queue:
            del self._queues[rank]

    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        """The block of the lowest rank that is not in `keep`, or None."""
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

    def _add_rank(self, rank: int) -> None:
        heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._queues) + 16:
            self._heap = list(self._queues)
            heapify(self._heap)


@mypyc_attr(allow_interpreted_subclasses=True)
class RankedEviction(EvictionPolicy):
    """Evicts the block of the lowest rank. Every hit raises the rank of a block by `step`."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._ranks: dict[BlockKey, int] = {}
        self._ranking = Ranking()

    def _add(self, key: BlockKey, rank: int) -> None:
        self._ranks[key] = rank
        self._ranking.put(key, rank)

    def hit(self, key: BlockKey) -> None:
        rank = self._ranks[key] = self._ranks[key] + self._step
        if key in self._ranking:
            self._ranking.drop(key)
            self._ranking.put(key, rank)

    def hold(self, key: BlockKey) -> None:
        self._ranking.drop(key)

    def release(self, key: BlockKey) -> None:
        self._ranking.put(key, self._ranks[key])

    def forget(self, key: BlockKey) -> None:
        self._ranking.drop(key)
        del self._ranks[key]

    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        return self._ranking.first(keep)
