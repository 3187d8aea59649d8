"""The clock of emulated engines and links: picoseconds that pass by themselves."""

import time
from typing import Protocol

from twofold.simulation.kernel import PS


class Clock(Protocol):
    """Tells the time and waits, in whole picoseconds of one clock."""

    def now(self) -> int: ...

    def sleep_until(self, moment: int) -> None:
        """Return no earlier than at `moment`; at once if it is past."""
        ...


class MonotonicClock:
    """The host's monotonic clock, which is the same in all its processes."""

    def now(self) -> int:
        return time.monotonic_ns() * (PS // 10**9)

    def sleep_until(self, moment: int) -> None:
        while (left := moment - self.now()) > 0:
            time.sleep(left / PS)
