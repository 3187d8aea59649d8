"""The eviction seam: which block goes first when a memory is full?

Blocks in the order of a rank that changes as they are used.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container
from heapq import heapify, heappop, heappush

from mypy_extensions import mypyc_attr

from twofold.request import BlockKey


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy(ABC):
    """Ranks the blocks of one memory that may go: those that are in it and that nobody holds.

    It is told of everything that happens to a block, each time once: stored, hit as often as it is, held and
    released in turn, and forgotten when it is gone, whether it was held or not. Every operation takes a time that does
    not grow with the number of blocks.
    """

    @abstractmethod
    def stored(self, key: BlockKey, position: int) -> None:
        """A block is in the memory from now on; `position` is its index in its prompt."""
        ...

    @abstractmethod
    def hit(self, key: BlockKey) -> None:
        """A request found the block here, which may be held."""
        ...

    @abstractmethod
    def hold(self, key: BlockKey) -> None:
        """The block may not go."""
        ...

    @abstractmethod
    def release(self, key: BlockKey) -> None:
        """The block may go again, and was in use until now."""
        ...

    @abstractmethod
    def forget(self, key: BlockKey) -> None:
        """The block is not in the memory any more."""
        ...

    @abstractmethod
    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        """Who goes first of those that are not to be kept; None when none may go. It stays until it is forgotten.

        Takes a time that does not grow with the number of blocks, but with how many of them are to be kept.
        """
        ...


class Ranking:
    """Blocks by rank, the lowest first; of those with equal ranks the one that has had it longest.

    Blocks of one rank stand in a line. The heap has every rank that has a line, and some that had one: they are
    skipped when they come up, and swept out when they are most of it.
    """

    __slots__ = ("_heap", "_lines", "_ranks")

    def __init__(self) -> None:
        self._ranks: dict[BlockKey, int] = {}
        self._lines: dict[int, OrderedDict[BlockKey, None]] = {}
        self._heap: list[int] = []

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._ranks

    def put(self, key: BlockKey, rank: int) -> None:
        """A block that is not here joins those of its rank, as the last of them."""
        line = self._lines.get(rank)
        if line is None:
            line = self._lines[rank] = OrderedDict()
            self._add_rank(rank)
        line[key] = None
        self._ranks[key] = rank

    def drop(self, key: BlockKey) -> None:
        """A block leaves, if it is here."""
        rank = self._ranks.pop(key, None)
        if rank is None:
            return
        line = self._lines[rank]
        del line[key]
        if not line:
            del self._lines[rank]

    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        """The block of the lowest rank that is not to be kept; None when none is here."""
        heap, lines = self._heap, self._lines
        found: BlockKey | None = None
        passed: list[int] = []  # ranks of which all are kept
        while heap:
            rank = heap[0]
            line = lines.get(rank)
            if line is not None:
                for key in line:
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
        if len(self._heap) > 2 * len(self._lines) + 16:
            self._heap = list(self._lines)
            heapify(self._heap)
