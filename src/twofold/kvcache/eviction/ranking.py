"""Blocks in the order of a rank that changes as they are used."""

from collections import OrderedDict
from collections.abc import Container
from heapq import heapify, heappop, heappush

from twofold.request import BlockKey


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
