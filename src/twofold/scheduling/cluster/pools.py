"""Pools that group instances by role and find the least loaded instance of a role."""

from collections.abc import Iterator
from typing import Final

from twofold.instance import HeapEntry, InstanceLoad, LoadMeasure, Ranking, Role
from twofold.scheduling.cluster.forecast import ClusterForecast

_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE


class _PendingTokens(LoadMeasure):
    def of(self, load: InstanceLoad) -> int:
        return load.pending_prefill_tokens + load.decodes


class _ReservedTokens(LoadMeasure):
    def of(self, load: InstanceLoad) -> int:
        return load.reserved_tokens


class _Requests(LoadMeasure):
    def of(self, load: InstanceLoad) -> int:
        return load.requests


# Pending work in tokens: prompt tokens to prefill, and one token for each request that decodes.
pending_tokens: Final = _PendingTokens()
reserved_tokens: Final = _ReservedTokens()
requests: Final = _Requests()


class Pool:
    """The instances of one role, in the order in which they joined."""

    def __init__(self) -> None:
        self._members: dict[str, InstanceLoad] = {}
        self._rankings: list[Ranking] = []
        self._joined = 0
        self._in_turn: list[InstanceLoad] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[InstanceLoad]:
        return iter(self._members.values())

    def add(self, load: InstanceLoad) -> None:
        self._joined += 1
        load.place = self._joined
        self._members[load.id] = load
        self._in_turn = []
        for ranking in self._rankings:
            load.standings.append(HeapEntry(ranking, load))

    def remove(self, load: InstanceLoad) -> None:
        del self._members[load.id]
        self._in_turn = []
        for standing in load.standings:
            standing.leave()
        load.standings = []
        load.place = 0

    def least(self, measure: LoadMeasure) -> InstanceLoad | None:
        """Return the instance with the lowest load; None if the pool is empty."""
        if not self._members:
            return None
        # In constant time; of equals, the first to join.
        for ranking in self._rankings:
            if ranking.measure is measure:
                return ranking.heap[0].load
        added = Ranking(measure)
        self._rankings.append(added)
        for load in self._members.values():
            load.standings.append(HeapEntry(added, load))
        return added.heap[0].load

    def nth(self, number: int) -> InstanceLoad | None:
        """Return the instance at index `number` modulo the pool size; None if the pool is empty."""
        if not self._members:
            return None
        if not self._in_turn:
            self._in_turn = list(self._members.values())
        return self._in_turn[number % len(self._in_turn)]


class Pools:
    """One pool of instances for each role."""

    def __init__(self) -> None:
        self.forecast: ClusterForecast | None = None  # set if the router needs a load forecast
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
        self.enter(load)

    def remove(self, instance_id: str) -> None:
        load = self._loads.pop(instance_id)
        self.pause(load)

    def pause(self, load: InstanceLoad) -> None:
        """Remove an instance from its pool until `resume`."""
        if load.place:
            self.leave(load)

    def resume(self, load: InstanceLoad) -> None:
        """Append a paused instance to its pool again."""
        if not load.place:
            self.enter(load)

    def move(self, load: InstanceLoad, role: Role) -> None:
        """Move an instance to the pool of another role."""
        paused = not load.place  # a paused instance enters the new pool on `resume`
        self.pause(load)
        load.role = role
        if not paused:
            self.enter(load)

    # Subclasses with further pools override the next two methods.

    def enter(self, load: InstanceLoad) -> None:
        """Append an instance to the pool of its role."""
        self[load.role].add(load)

    def leave(self, load: InstanceLoad) -> None:
        """Remove an instance from the pool of its role."""
        self[load.role].remove(load)

    def changed(self, load: InstanceLoad) -> None:
        """Update the rankings of an instance's pool after its load changed."""
        for standing in load.standings:
            standing.changed()
