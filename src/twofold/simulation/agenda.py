"""What is to happen, soonest first."""

from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Event(ABC):
    """Something that happens at picosecond `at`; at the same time, in the order of `order`, then of being added."""

    # The agenda's own: how manieth it was added, what comes after it for certain, and who else does after the same.
    __slots__ = ("at", "later", "number", "order", "sibling")

    def __init__(self, at: int, order: int) -> None:
        self.at = at
        self.order = order
        self.number = 0
        self.later: Event | None = None
        self.sibling: Event | None = None

    @abstractmethod
    def happen(self) -> None: ...


class Agenda:
    """A pairing heap (Fredman, Sedgewick, Sleator and Tarjan, 1986): a tree in which every event comes before those
    below it.

    It is written out because it is compiled: `heapq` would compare tuples, or ask the events themselves, either at
    several times the cost of all that an event does here.
    """

    def __init__(self) -> None:
        self.size = 0
        self._added = 0
        self._first: Event | None = None

    def add(self, event: Event) -> None:
        self.size += 1
        self._added += 1
        event.number = self._added
        self._first = event if self._first is None else _first_of(self._first, event)

    def next(self) -> Event:
        """Take the soonest; raises IndexError if there is none."""
        first = self._first
        if first is None:
            raise IndexError("there is no event")
        self.size -= 1
        self._first = _joined(first.later)
        first.later = None
        return first

    def clear(self) -> None:
        self.size = 0
        self._first = None


def _first_of(one: Event, other: Event) -> Event:
    """Which of two events comes first, the other now below it."""
    if other.at < one.at or (other.at == one.at and _precedes(other, one)):
        one, other = other, one
    other.sibling = one.later
    one.later = other
    return one


def _precedes(one: Event, other: Event) -> bool:
    """Which of two events at the same time comes first."""
    return one.order < other.order if one.order != other.order else one.number < other.number


def _joined(event: Event | None) -> Event | None:
    """The first of siblings, the others now below it: joined in pairs, then pair after pair."""
    pairs: Event | None = None
    while event is not None:
        other = event.sibling
        if other is None:
            event.sibling = pairs
            pairs = event
            break
        rest = other.sibling
        pair = _first_of(event, other)
        pair.sibling = pairs
        pairs = pair
        event = rest
    first = pairs
    if first is not None:
        pairs = first.sibling
        first.sibling = None
        while pairs is not None:
            rest = pairs.sibling
            first = _first_of(first, pairs)
            pairs = rest
        first.sibling = None
    return first
