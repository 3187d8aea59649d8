"""What is to happen, soonest first."""

from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Event(ABC):
    """Something that happens at picosecond `at`; at the same time, in the order of `order`, then of being added."""

    __slots__ = ("at", "number", "order")

    def __init__(self, at: int, order: int) -> None:
        self.at = at
        self.order = order
        self.number = 0

    @abstractmethod
    def happen(self) -> None: ...


class Agenda:
    """A binary heap of events.

    It is written out because it is compiled: `heapq` would compare tuples or ask the events themselves, either at
    several times the cost of all that an event does here.
    """

    def __init__(self) -> None:
        self._heap: list[Event] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, event: Event) -> None:
        self._added += 1
        event.number = self._added
        self._heap.append(event)
        self._rise(len(self._heap) - 1, event)

    def next(self) -> Event:
        """Take the soonest; there must be one."""
        heap = self._heap
        last = heap.pop()
        size = len(heap)
        if not size:
            return last
        first = heap[0]
        # The gap at the top sinks to the bottom, where `last` came from and where it mostly belongs.
        gap, child = 0, 1
        while child < size:
            event = heap[child]
            if child + 1 < size:
                other = heap[child + 1]
                if other.at < event.at or (other.at == event.at and _before(other, event)):
                    event = other
                    child += 1
            heap[gap] = event
            gap = child
            child = 2 * gap + 1
        self._rise(gap, last)
        return first

    def clear(self) -> None:
        self._heap.clear()

    def _rise(self, gap: int, event: Event) -> None:
        """Put an event into the gap, or above it, where it belongs."""
        heap, at = self._heap, event.at
        while gap:
            above = (gap - 1) >> 1
            parent = heap[above]
            if parent.at < at or (parent.at == at and not _before(event, parent)):
                break
            heap[gap] = parent
            gap = above
        heap[gap] = event


def _before(one: Event, other: Event) -> bool:
    """Which of two events at the same time comes first."""
    return one.order < other.order if one.order != other.order else one.number < other.number
