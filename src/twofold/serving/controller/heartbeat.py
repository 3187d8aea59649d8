"""Heartbeats between hosts: watchdog timeouts and clock offsets.

The controller cannot kill a process on another host. The process exits by itself `WATCHDOG_S` seconds after the
send time of the last acknowledged heartbeat. The controller presumes the process dead `WATCHDOG_S` plus
`WATCHDOG_MARGIN_S` seconds after the receipt of the last heartbeat. The process thus always exits first, even if
messages are delayed or lost.
"""

import time

ALIVE_S = 0.2  # heartbeat interval
WATCHDOG_S = 5.0
WATCHDOG_MARGIN_S = 1.0  # covers different clock rates and the time to exit
DRIFT = 1e-4  # bound on the relative drift of two clocks, which is tens of ppm as a rule


def watchdog_clock() -> float:
    """Return the time in seconds of a clock that also advances while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ParentWatchdog:
    """Deadline at which a remote worker must exit if the controller acknowledges no further heartbeat."""

    def __init__(self, now: float) -> None:
        self._until_s = now + WATCHDOG_S

    def acknowledged(self, sent_s: float) -> None:
        """Extend the deadline to `WATCHDOG_S` after the send time of an acknowledged heartbeat."""
        self._until_s = max(self._until_s, sent_s + WATCHDOG_S)

    def left_s(self, now: float) -> float:
        """Return the seconds until the process must exit; 0 after the deadline."""
        return max(0.0, self._until_s - now)


def presumed_dead(heard_s: float, now: float) -> bool:
    """Return whether a process has been silent for longer than the watchdog timeout plus a safety margin."""
    return now - heard_s > WATCHDOG_S + WATCHDOG_MARGIN_S


class ClockOffset:
    """Estimated offset from another host's monotonic clock to the local clock."""

    def __init__(self, remote_s: float, local_s: float) -> None:
        """Estimate the offset from a message sent at `remote_s` and received at `local_s`."""
        self._offset_s = local_s - remote_s
        self._updated_s = local_s

    def update(self, remote_s: float, local_s: float) -> None:
        """Improve the estimated offset with a later message, sent at `remote_s` and received at `local_s`."""
        drifted_s = self._offset_s + DRIFT * (local_s - self._updated_s)
        # Receive time minus send time is an upper limit of the offset; the estimate is the lowest limit. Older limits
        # are raised because clocks drift. Converted times are never early, and late by little more than the shortest
        # delay.
        self._offset_s = min(drifted_s, local_s - remote_s)
        self._updated_s = local_s

    def to_local(self, remote_s: float) -> float:
        """Convert a time on the other host's clock to the local clock."""
        return remote_s + self._offset_s
