"""The event kernel: a virtual clock in whole picoseconds and a queue of events.

Events at the same time happen in order of their kind and subject (`order`), then in the order of scheduling. Equal
inputs therefore give equal runs, no matter how many iterations an instance runs per event.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

Action = Callable[[Any], None]


class EventOrder:
    """Kinds of events in the order in which they happen at the same time; each is added to a number of its
    subject."""

    COMPLETION: Final = 0
    TRANSFER: Final = 1 << 40
    RETRY: Final = 2 << 40
    ARRIVAL: Final = 3 << 40
    FAILURE: Final = 4 << 40
    REPLAN: Final = 5 << 40
    REPORT: Final = 6 << 40


@mypyc_attr(allow_interpreted_subclasses=True)
class Event(ABC):
    """An event at picosecond `at`."""

    __slots__ = ("at", "order")

    at: int
    order: int

    @abstractmethod
    def happen(self) -> None: ...


class _Call(Event):
    """A call of any function with one argument."""

    __slots__ = ("action", "argument")

    def __init__(self, at: int, order: int, action: Action, argument: object) -> None:
        self.at = at
        self.order = order
        self.action = action
        self.argument = argument

    def happen(self) -> None:
        self.action(self.argument)


class Kernel:
    """Runs events in order of time.

    Events are in a sorted list, the next one last. Up to many thousands of events, moving the end of the list costs
    less than a heap, where comparisons take the time.
    """

    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self.before_step: Callable[[int], None] | None = None  # called with the time of each event
        self._queue: list[Event] = []

    def schedule(self, at: int, order: int, action: Action, argument: object = None) -> None:
        """Call `action(argument)` at picosecond `at`; raises ValueError for the past."""
        self.add(_Call(at, order, action, argument))

    def add(self, event: Event) -> None:
        """Schedule an event; raises ValueError for the past."""
        if event.at < self.now:
            raise ValueError(f"an event was scheduled {self.now - event.at} ps in the past")
        queue, at, order = self._queue, event.at, event.order
        low: i64 = 0
        high: i64 = len(queue)
        while low < high:
            middle = (low + high) >> 1
            other = queue[middle]
            if other.at > at or (other.at == at and other.order > order):
                low = middle + 1
            else:
                high = middle
        queue.insert(low, event)

    @property
    def pending(self) -> int:
        """Number of scheduled events, void ones included."""
        return len(self._queue)

    def run(self, until_events: int) -> bool:
        """Run events until `until_events` have happened in all; False if none is left."""
        queue, before = self._queue, self.before_step
        while queue:
            if self.events >= until_events:
                return True
            event = queue.pop()
            if before is not None:
                before(event.at)
            self.now = event.at
            self.events += 1
            event.happen()
        return False
