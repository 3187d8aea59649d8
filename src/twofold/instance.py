"""Roles and loads of instances. An instance is one copy of the model, which runs batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum

from mypy_extensions import i64, mypyc_attr


class Role(StrEnum):
    """Role of an instance: the phases that it runs (Splitwise section 4.1: prompt, token and mixed pools)."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


@mypyc_attr(allow_interpreted_subclasses=True)
class LoadMeasure(ABC):
    """Measure of an instance's load, by which routers rank instances."""

    @abstractmethod
    def of(self, load: "InstanceLoad") -> int: ...


class Ranking:
    """Heap of the instances of a pool, ordered by load."""

    __slots__ = ("heap", "measure")

    def __init__(self, measure: LoadMeasure) -> None:
        self.measure = measure
        self.heap: list[HeapEntry] = []


class HeapEntry:
    """Entry of an instance in the heap of a `Ranking`."""

    __slots__ = ("load", "number", "place", "position", "ranking")

    def __init__(self, ranking: Ranking, load: "InstanceLoad") -> None:
        self.ranking = ranking
        self.load = load
        self.number: i64 = ranking.measure.of(load)
        self.place: i64 = load.place  # breaks ties
        self.position: i64 = len(ranking.heap)
        ranking.heap.append(self)
        self.rise()

    def changed(self) -> None:
        """Restore the heap order after a change of the instance's load."""
        before = self.number
        self.number = number = self.ranking.measure.of(self.load)
        if number < before:
            self.rise()
        elif number > before:
            self.sink()

    def leave(self) -> None:
        """Remove this entry from the heap."""
        heap = self.ranking.heap
        last = heap.pop()
        if last is not self:
            last.position = self.position
            heap[last.position] = last
            last.rise()
            last.sink()

    def rise(self) -> None:
        """Move this entry up the heap, past all entries with a higher load."""
        heap, at, number, place = self.ranking.heap, self.position, self.number, self.place
        while at > 0:
            above = heap[(at - 1) >> 1]
            if above.number < number or (above.number == number and above.place < place):
                break
            heap[at] = above
            above.position, at = at, above.position
        heap[at] = self
        self.position = at

    def sink(self) -> None:
        """Move this entry down the heap, past all entries with a lower load."""
        heap, at, number, place = self.ranking.heap, self.position, self.number, self.place
        size: i64 = len(heap)
        while (child := 2 * at + 1) < size:
            below = heap[child]
            if child + 1 < size:
                other = heap[child + 1]
                if other.number < below.number or (other.number == below.number and other.place < below.place):
                    below = other
            if number < below.number or (number == below.number and place < below.place):
                break
            heap[at] = below
            below.position, at = at, below.position
        heap[at] = self
        self.position = at


class LoadTotals:
    """Load on one or more instances, as numbers of tokens and requests."""

    def __init__(
        self,
        pending_prefill_tokens: int = 0,
        reserved_tokens: int = 0,
        prefills: int = 0,
        decodes: int = 0,
        requests: int = 0,
    ) -> None:
        self.pending_prefill_tokens = pending_prefill_tokens  # routed to the instance and not yet prefilled
        self.reserved_tokens = reserved_tokens  # KV that the routed requests may occupy on the instance
        self.prefills = prefills  # routed requests whose prefill on the instance is not complete
        self.decodes = decodes  # routed requests whose decode on the instance is not complete
        self.requests = requests  # routed requests with either, each counted once

    def less(self, other: "LoadTotals") -> "LoadTotals":
        """Return this load minus `other`."""
        return LoadTotals(
            self.pending_prefill_tokens - other.pending_prefill_tokens,
            self.reserved_tokens - other.reserved_tokens,
            self.prefills - other.prefills,
            self.decodes - other.decodes,
            self.requests - other.requests,
        )

    def replace(self, old: "LoadTotals", new: "LoadTotals") -> None:
        """Subtract `old` from this load and add `new`."""
        self.pending_prefill_tokens += new.pending_prefill_tokens - old.pending_prefill_tokens
        self.reserved_tokens += new.reserved_tokens - old.reserved_tokens
        self.prefills += new.prefills - old.prefills
        self.decodes += new.decodes - old.decodes
        self.requests += new.requests - old.requests


NO_LOAD = LoadTotals()


class InstanceLoad(LoadTotals):
    """The load of an instance, as routers see it."""

    def __init__(
        self,
        id: str,  # noqa: A002  (the name used everywhere)
        role: Role,
        capacity_tokens: int | None = None,
        cell: str = "",
    ) -> None:
        super().__init__()
        self.id = id
        self.role = self.home = role  # of the current pool, and of the pool for which the instance was started
        self.capacity_tokens = capacity_tokens  # KV that fits in memory, if known
        self.decoding = 0  # placed requests between their first and their last token
        self.queued: Callable[[], int] = lambda: 0  # number of waiting sequences, 0 if unknown
        self.place = 0  # number in the order of joining the pool, 0 in no pool
        self.cache = id  # name of the prefix cache, which other instances of the host may share
        self.cell = cell  # group of nearby instances, if the router uses cells
        self.standings: list[HeapEntry] = []
