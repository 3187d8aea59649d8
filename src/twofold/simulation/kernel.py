"""The event kernel: a clock of whole picoseconds and a heap of what happens next.

Times are integers, so sums of them are exact: a run of a thousand iterations taken at once ends at the very
picosecond at which the last of a thousand single ones would. Events at the same time happen in the order of
their kind, then of what they are about (`order`), then as they were scheduled: equal inputs give equal runs,
however many steps an instance takes at a time.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final

PS = 10**12  # picoseconds in a second

Action = Callable[[Any], None]


def ps(seconds: float) -> int:
    """Whole picoseconds."""
    return round(seconds * PS)


class Order:
    """Kinds of events in the order in which they happen at the same time; a number of its kind is added to each."""

    COMPLETION: Final = 0
    TRANSFER: Final = 1 << 40
    RETRY: Final = 2 << 40
    ARRIVAL: Final = 3 << 40
    FAILURE: Final = 4 << 40


class Kernel:
    """Schedules actions and runs them in order of time."""

    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self.before_step: Callable[[int], None] | None = None  # told the time of the next event
        self._heap: list[tuple[int, int, int, Action, Any]] = []
        self._scheduled = 0

    def schedule(self, at: int, order: int, action: Action, argument: object = None) -> None:
        """`action(argument)` is to happen at picosecond `at`; the past cannot be scheduled."""
        if at < self.now:
            raise ValueError(f"an event was scheduled {self.now - at} ps in the past")
        self._scheduled += 1
        heappush(self._heap, (at, order, self._scheduled, action, argument))

    @property
    def pending(self) -> int:
        """Events that are scheduled, those that will turn out to be void included."""
        return len(self._heap)

    def run(self, until_events: int) -> bool:
        """Let events happen until that many have in all, or none is left (then False)."""
        heap, before, pop = self._heap, self.before_step, heappop
        while heap:
            if self.events >= until_events:
                return True
            at, _, _, action, argument = pop(heap)
            if before is not None:
                before(at)
            self.now = at
            self.events += 1
            action(argument)
        return False
