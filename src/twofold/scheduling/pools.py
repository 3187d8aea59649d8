"""The pools of a cluster: which instances play which role now, and which of them has least of something.

Finding the least loaded instance costs the logarithm of their number, so that a router is as quick on a thousand
instances as on ten: each measure that is asked for keeps a heap, in which numbers that have changed since are
skipped when they come up.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from twofold.instance import InstanceLoad, Role

Measure = Callable[[InstanceLoad], float]
_Entry = tuple[float, int, int, InstanceLoad]


class Pool:
    """Instances in the order in which they joined."""

    def __init__(self) -> None:
        self._members: dict[str, InstanceLoad] = {}
        self._heaps: dict[Measure, list[_Entry]] = {}
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
        load.version += 1

    def changed(self, load: InstanceLoad) -> None:
        """The numbers of a member are others now."""
        load.version = version = load.version + 1
        for measure, heap in self._heaps.items():
            heappush(heap, (measure(load), load.place, version, load))
            if len(heap) > self._many:
                heap[:] = self._entries(measure)
                heapify(heap)

    def least(self, measure: Measure) -> InstanceLoad | None:
        """The member with the least of `measure`, the one that joined first among equals; None if there is none."""
        heap = self._heaps.get(measure)
        if heap is None:
            heap = self._heaps[measure] = self._entries(measure)
            heapify(heap)
        while heap:
            load = heap[0][3]
            if load.version == heap[0][2]:
                return load
            heappop(heap)
        return None

    def nth(self, number: int) -> InstanceLoad | None:
        """Member `number`, counted round and round in the order in which they joined."""
        if not self._members:
            return None
        if not self._in_turn:
            self._in_turn = list(self._members.values())
        return self._in_turn[number % len(self._in_turn)]

    def _entries(self, measure: Measure) -> list[_Entry]:
        return [(measure(load), load.place, load.version, load) for load in self._members.values()]


class Pools:
    """One pool per role; every instance is in the one of its role."""

    def __init__(self) -> None:
        self._pools = {role: Pool() for role in Role}
        self._loads: dict[str, InstanceLoad] = {}

    def __getitem__(self, role: Role) -> Pool:
        return self._pools[role]

    def __iter__(self) -> Iterator[InstanceLoad]:
        return iter(self._loads.values())

    def get(self, instance_id: str) -> InstanceLoad | None:
        return self._loads.get(instance_id)

    @property
    def prefill(self) -> Pool:
        return self._pools[Role.PREFILL]

    @property
    def decode(self) -> Pool:
        return self._pools[Role.DECODE]

    @property
    def mixed(self) -> Pool:
        return self._pools[Role.MIXED]

    def add(self, load: InstanceLoad) -> None:
        self._loads[load.id] = load
        self._pools[load.role].add(load)

    def remove(self, instance_id: str) -> None:
        load = self._loads.pop(instance_id)
        self._pools[load.role].remove(load)

    def move(self, load: InstanceLoad, role: Role) -> None:
        """Put an instance last in another pool."""
        self._pools[load.role].remove(load)
        load.role = role
        self._pools[role].add(load)

    def changed(self, load: InstanceLoad) -> None:
        self._pools[load.role].changed(load)


# -- measures -------------------------------------------------------------------------------------------------------


def pending_tokens(load: InstanceLoad) -> float:
    """Tokens of work that wait: prompts to prefill, and one for each request that decodes."""
    return load.pending_prefill_tokens + load.decodes


def reserved_tokens(load: InstanceLoad) -> float:
    return load.reserved_tokens


def requests(load: InstanceLoad) -> float:
    return load.requests
