"""The tether: how long a process on another host may go on without the controller, which cannot kill it there.

Both sides count from the same event: something that the process said, and that the controller heard. The process may
go on for `WATCHDOG_S` from when it said it; the controller takes it for dead `TERM_S + MARGIN_S` from when it
heard it. It
cannot have heard it before it was said, so however long messages take, in either direction, and however many are lost,
the process ends first. The margin is for clocks that run at different rates, and for the time that ending takes.

What the monotonic clock of another host shows in terms of ours.
"""

import time

WATCHDOG_S = 5.0
WATCHDOG_MARGIN_S = 1.0


def watchdog_clock() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ParentWatchdog:
    """The side of the process that may have to end; `now` is on its own clock."""

    def __init__(self, now: float) -> None:
        self._until_s = now + WATCHDOG_S

    def heard(self, said_s: float) -> None:
        """The controller answers what was said at `said_s`. Answers may come in any order, and late."""
        self._until_s = max(self._until_s, said_s + WATCHDOG_S)

    def left_s(self, now: float) -> float:
        """Seconds until it must end, 0 if it must have."""
        return max(0.0, self._until_s - now)


def presumed_dead(heard_s: float, now: float) -> bool:
    """The side of the controller, on its clock: whether one that was last heard at `heard_s` has ended by now."""
    return now - heard_s > WATCHDOG_S + WATCHDOG_MARGIN_S


# Two clocks drift apart, by tens of millionths as a rule: older measurements count less.
DRIFT = 1e-4


class ClockOffset:
    """From messages that tell when they were sent: each of them bounds the offset from above, the quickest the best.

    A moment that is translated is late by no more than the quickest message took, and never early.
    """

    def __init__(self, theirs_s: float, ours_s: float) -> None:
        """A message that was sent at `theirs_s` is here at `ours_s`."""
        self._offset_s = ours_s - theirs_s
        self._heard_s = ours_s

    def heard(self, theirs_s: float, ours_s: float) -> None:
        """Another."""
        drifted_s = self._offset_s + DRIFT * (ours_s - self._heard_s)
        self._offset_s = min(drifted_s, ours_s - theirs_s)
        self._heard_s = ours_s

    def ours(self, theirs_s: float) -> float:
        """A moment of their clock on ours."""
        return theirs_s + self._offset_s
