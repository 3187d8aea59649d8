"""Heartbeats between hosts: watchdogs of processes and clock offsets.

The controller cannot kill a process on another host, so the process ends by itself when its heartbeats are no longer
acknowledged. Both sides count from the same heartbeat. The process may run for `WATCHDOG_S` after it sent the
heartbeat; the controller presumes the process dead `WATCHDOG_S + WATCHDOG_MARGIN_S` after it received the heartbeat. A
heartbeat is received after it was sent, so the process ends first for any message delay or loss. The margin covers
different clock rates and the time to exit.
"""

import time

ALIVE_S = 0.2  # heartbeat interval
WATCHDOG_S = 5.0
WATCHDOG_MARGIN_S = 1.0
DRIFT = 1e-4  # bound on the relative drift of two clocks, which is tens of ppm as a rule


def watchdog_clock() -> float:
    """Return the seconds of a clock that keeps running while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ParentWatchdog:
    """Deadline by which a process on another host must end, unless its heartbeats are acknowledged."""

    def __init__(self, now: float) -> None:
        self._until_s = now + WATCHDOG_S

    def acknowledged(self, sent_s: float) -> None:
        """Extend the deadline when the heartbeat sent at `sent_s` is acknowledged; a late call is harmless."""
        self._until_s = max(self._until_s, sent_s + WATCHDOG_S)

    def left_s(self, now: float) -> float:
        """Return the seconds until the process must end; 0 after the deadline."""
        return max(0.0, self._until_s - now)


def presumed_dead(heard_s: float, now: float) -> bool:
    """Return whether a process must have ended by its watchdog, after its last heartbeat arrived at `heard_s`."""
    return now - heard_s > WATCHDOG_S + WATCHDOG_MARGIN_S


class ClockOffset:
    """Estimated offset from another host's monotonic clock to the local clock.

    Each message with a time stamp is an upper bound of the offset, and the message with the shortest delay is the
    tightest bound. A converted time is never early, and late by at most that shortest delay. Older bounds are relaxed
    by `DRIFT`.
    """

    def __init__(self, remote_s: float, local_s: float) -> None:
        """Estimate the offset from a message sent at `remote_s` and received at `local_s`."""
        self._offset_s = local_s - remote_s
        self._updated_s = local_s

    def update(self, remote_s: float, local_s: float) -> None:
        """Tighten the estimate with a message sent at `remote_s` and received at `local_s`."""
        drifted_s = self._offset_s + DRIFT * (local_s - self._updated_s)
        self._offset_s = min(drifted_s, local_s - remote_s)
        self._updated_s = local_s

    def to_local(self, remote_s: float) -> float:
        """Return the local time that corresponds to `remote_s`, a time on the other host's clock."""
        return remote_s + self._offset_s
