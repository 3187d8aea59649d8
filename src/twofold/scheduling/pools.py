"""The pools of a cluster: which instances play which role now, and which of them has least of something.

Finding the least loaded instance costs the logarithm of their number, so that a router is as quick on a thousand
instances as on ten: each measure that is asked for keeps a heap in which every instance has an entry that is at most
its number now. One that fell gets another entry at once; one that rose is put right when it comes up.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.instance import InstanceLoad, Role

_Entry = tuple[int, int, InstanceLoad]

_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE


@mypyc_attr(allow_interpreted_subclasses=True)
class Measure(ABC):
    """How much there is of something on an instance."""

    @abstractmethod
    def of(self, load: InstanceLoad) -> int: ...

    def __call__(self, load: InstanceLoad) -> int:
        return self.of(load)


class _PendingTokens(Measure):
    def of(self, load: InstanceLoad) -> int:
        return load.pending_prefill_tokens + load.decodes


class _ReservedTokens(Measure):
    def of(self, load: InstanceLoad) -> int:
        return load.reserved_tokens


class _Requests(Measure):
    def of(self, load: InstanceLoad) -> int:
        return load.requests


# Tokens of work that wait: prompts to prefill, and one for each request that decodes.
pending_tokens: Final = _PendingTokens()
reserved_tokens: Final = _ReservedTokens()
requests: Final = _Requests()


class _Ranking:
    """The members of a pool by one measure. Of a member's entries only the lowest counts, which `lowest` keeps."""

    def __init__(self, measure: Measure, members: Iterable[InstanceLoad]) -> None:
        self.measure = measure
        self.heap: list[_Entry] = []
        self.lowest: dict[int, int] = {}
        self.rebuild(members)

    def __len__(self) -> int:
        return len(self.heap)

    def rebuild(self, members: Iterable[InstanceLoad]) -> None:
        """Leave one entry for each member."""
        self.heap[:] = [(self.measure.of(load), load.place, load) for load in members]
        heapify(self.heap)
        self.lowest = {place: number for number, place, _ in self.heap}

    def changed(self, load: InstanceLoad) -> None:
        """A member's number may be another now, or it is new."""
        number, place = self.measure.of(load), load.place
        known = self.lowest.get(place)
        if known is None or number < known:
            self.lowest[place] = number
            heappush(self.heap, (number, place, load))

    def least(self) -> InstanceLoad | None:
        heap, lowest = self.heap, self.lowest
        while heap:
            number, place, load = heap[0]
            if lowest.get(place) != number:
                heappop(heap)  # another entry of it counts, or it left
                continue
            now = self.measure.of(load)
            if now == number:
                return load
            lowest[place] = now
            heapreplace(heap, (now, place, load))
        return None


class Pool:
    """Instances in the order in which they joined."""

    def __init__(self) -> None:
        self._members: dict[str, InstanceLoad] = {}
        self._heaps: dict[Measure, _Ranking] = {}
        self._rankings: list[_Ranking] = []
        self._joined = 0
        self._in_turn: list[InstanceLoad] = []
        self._many = 64  # entries of a heap from which those that are out of date are cleared away

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[InstanceLoad]:
        return iter(self._members.values())

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._members

    def add(self, load: InstanceLoad) -> None:
        self._joined += 1
        load.place = self._joined
        self._members[load.id] = load
        self._many = 4 * len(self._members) + 64
        self._in_turn = []
        self.changed(load)

    def remove(self, load: InstanceLoad) -> None:
        del self._members[load.id]
        self._in_turn = []
        for ranking in self._heaps.values():
            del ranking.lowest[load.place]
        load.place = 0

    def changed(self, load: InstanceLoad) -> None:
        """The numbers of a member are others now."""
        for ranking in self._rankings:
            ranking.changed(load)
            if len(ranking.heap) > self._many:
                ranking.rebuild(self._members.values())

    def least(self, measure: Measure) -> InstanceLoad | None:
        """The member with the least of `measure`, the one that joined first among equals; None if there is none."""
        ranking = self._heaps.get(measure)
        if ranking is None:
            ranking = self._heaps[measure] = _Ranking(measure, self._members.values())
            self._rankings.append(ranking)
        return ranking.least()

    def nth(self, number: int) -> InstanceLoad | None:
        """Member `number`, counted round and round in the order in which they joined."""
        if not self._members:
            return None
        if not self._in_turn:
            self._in_turn = list(self._members.values())
        return self._in_turn[number % len(self._in_turn)]


class Pools:
    """One pool per role; every instance is in the one of its role."""

    def __init__(self) -> None:
        self.prefill, self.decode, self.mixed = Pool(), Pool(), Pool()
        self._loads: dict[str, InstanceLoad] = {}

    def __getitem__(self, role: Role) -> Pool:
        if role is _PREFILL:
            return self.prefill
        return self.decode if role is _DECODE else self.mixed

    def __iter__(self) -> Iterator[InstanceLoad]:
        return iter(self._loads.values())

    def get(self, instance_id: str) -> InstanceLoad | None:
        return self._loads.get(instance_id)

    def add(self, load: InstanceLoad) -> None:
        self._loads[load.id] = load
        self[load.role].add(load)

    def remove(self, instance_id: str) -> None:
        load = self._loads.pop(instance_id)
        self.pause(load)

    def pause(self, load: InstanceLoad) -> None:
        """Take an instance out of its pool, but remember it."""
        if load.place:
            self[load.role].remove(load)

    def resume(self, load: InstanceLoad) -> None:
        """Put an instance that was paused last in its pool."""
        if not load.place:
            self[load.role].add(load)

    def move(self, load: InstanceLoad, role: Role) -> None:
        """Put an instance last in another pool; one that is paused will come back there."""
        paused = not load.place
        self.pause(load)
        load.role = role
        if not paused:
            self[role].add(load)

    def changed(self, load: InstanceLoad) -> None:
        self[load.role].changed(load)
