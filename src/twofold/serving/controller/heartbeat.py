"""Heartbeats between hosts: watchdogs that end processes without contact, and clock offsets.

The controller cannot kill a process on another host. The process therefore exits by itself if its heartbeats are no
longer acknowledged: `WATCHDOG_S` after it sent the last acknowledged heartbeat. The controller presumes the process
dead `WATCHDOG_S` plus `WATCHDOG_MARGIN_S` after it received the last heartbeat. A heartbeat is received after it was
sent, so the process always exits before it is presumed dead, even if messages are delayed or lost. The margin covers
different clock rates and the time to exit.
"""

import time

ALIVE_S = 0.2  # heartbeat interval
WATCHDOG_S = 5.0
WATCHDOG_MARGIN_S = 1.0
DRIFT = 1e-4  # bound on the relative drift of two clocks, which is tens of ppm as a rule


def watchdog_clock() -> float:
    """Return the time in seconds of a clock that also advances while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ParentWatchdog:
    """Deadline by which a process on another host must exit. Each acknowledged heartbeat extends the deadline."""

    def __init__(self, now: float) -> None:
        self._until_s = now + WATCHDOG_S

    def acknowledged(self, sent_s: float) -> None:
        """Extend the deadline to `WATCHDOG_S` after `sent_s`, the send time of the acknowledged heartbeat."""
        self._until_s = max(self._until_s, sent_s + WATCHDOG_S)

    def left_s(self, now: float) -> float:
        """Return the seconds until the process must exit; 0 after the deadline."""
        return max(0.0, self._until_s - now)


def presumed_dead(heard_s: float, now: float) -> bool:
    """Return whether a process, last heard at `heard_s`, must be dead because its watchdog has expired since then."""
    return now - heard_s > WATCHDOG_S + WATCHDOG_MARGIN_S


class ClockOffset:
    """Estimated offset from another host's monotonic clock to the local clock.

    For each message, local receive time minus remote send time is an upper limit of the offset. The estimate is the
    lowest of these limits. Older limits are raised with time at the rate `DRIFT`, because the clocks may drift apart.
    Thus converted times are never early, and late by little more than the shortest message delay.
    """

    def __init__(self, remote_s: float, local_s: float) -> None:
        """Initialize the estimate with a message sent at `remote_s` and received at `local_s`."""
        self._offset_s = local_s - remote_s
        self._updated_s = local_s

    def update(self, remote_s: float, local_s: float) -> None:
        """Improve the estimate with another message, sent at `remote_s` and received at `local_s`."""
        drifted_s = self._offset_s + DRIFT * (local_s - self._updated_s)
        self._offset_s = min(drifted_s, local_s - remote_s)
        self._updated_s = local_s

    def to_local(self, remote_s: float) -> float:
        """Convert `remote_s`, a time on the other host's clock, to a time on the local clock."""
        return remote_s + self._offset_s
