"""The event kernel: a clock of whole picoseconds and a line of what happens next.

Times are integers, so sums of them are exact: a run of a thousand iterations taken at once ends at the very
picosecond at which the last of a thousand single ones would. Events at the same time happen in the order of
their kind, then of what they are about (`order`), then as they were scheduled: equal inputs give equal runs,
however many steps an instance takes at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

PS: Final = 10**12  # picoseconds in a second

Action = Callable[[Any], None]

_PS: Final = 1e12
# A float from here on has no fraction, so that one added to it is rounded to a whole, halves to even, as by `round`.
_WHOLE: Final = 4503599627370496.0  # 2⁵²


def nearest(number: float) -> int:
    """`round(number)`, quicker."""
    return int(number + _WHOLE - _WHOLE) if 0.0 <= number < _WHOLE else round(number)


def ps(seconds: float) -> int:
    """Whole picoseconds."""
    return nearest(seconds * _PS)


class EventOrder:
    """Kinds of events in the order in which they happen at the same time; a number of its kind is added to each."""

    COMPLETION: Final = 0
    TRANSFER: Final = 1 << 40
    RETRY: Final = 2 << 40
    ARRIVAL: Final = 3 << 40
    FAILURE: Final = 4 << 40
    REPLAN: Final = 5 << 40
    REPORT: Final = 6 << 40


@mypyc_attr(allow_interpreted_subclasses=True)
class Event(ABC):
    """Something that happens at picosecond `at`; at the same time, in the order of `order`, then of being scheduled."""

    __slots__ = ("at", "order")

    at: int
    order: int

    @abstractmethod
    def happen(self) -> None: ...


class _Call(Event):
    """Any function with any argument."""

    __slots__ = ("action", "argument")

    def __init__(self, at: int, order: int, action: Action, argument: object) -> None:
        self.at = at
        self.order = order
        self.action = action
        self.argument = argument

    def happen(self) -> None:
        self.action(self.argument)


class Kernel:
    """Schedules events and lets them happen in order of time.

    They stand in line, the next one last. To move up the rest of a line costs less than a heap does until there are
    many thousands: it is comparing that takes time.
    """

    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self.before_step: Callable[[int], None] | None = None  # told the time of the next event
        self._line: list[Event] = []

    def schedule(self, at: int, order: int, action: Action, argument: object = None) -> None:
        """`action(argument)` is to happen at picosecond `at`; the past cannot be scheduled."""
        self.add(_Call(at, order, action, argument))

    def add(self, event: Event) -> None:
        """The same for what happens so often that it has a kind of event of its own."""
        if event.at < self.now:
            raise ValueError(f"an event was scheduled {self.now - event.at} ps in the past")
        line, at, order = self._line, event.at, event.order
        low: i64 = 0
        high: i64 = len(line)
        while low < high:
            middle = (low + high) >> 1
            other = line[middle]
            if other.at > at or (other.at == at and other.order > order):
                low = middle + 1
            else:
                high = middle
        line.insert(low, event)

    @property
    def pending(self) -> int:
        """Events that are scheduled, those that will turn out to be void included."""
        return len(self._line)

    def run(self, until_events: int) -> bool:
        """Let events happen until that many have in all, or none is left (then False)."""
        line, before = self._line, self.before_step
        while line:
            if self.events >= until_events:
                return True
            event = line.pop()
            if before is not None:
                before(event.at)
            self.now = event.at
            self.events += 1
            event.happen()
        return False
