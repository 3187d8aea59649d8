"""The end of a worker on another host that does not hear the controller any more (see `serving/tether.py`)."""

import signal

from twofold.serving.tether import Tether, tether_clock

_AT_ONCE_S = 1e-6  # nothing at all would take the alarm back


class Deadline:
    """Nothing, on the controller's own host: workers die with it there."""

    def start(self) -> None:
        """To be called before the controller hears of this worker."""

    def heard(self, said_s: float) -> None:
        """The controller has heard what was said at `said_s`."""


class AlarmDeadline(Deadline):
    """The kernel ends the process, by SIGALRM, so that it ends also where all of its threads hang or are stopped."""

    def start(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._tether = Tether(tether_clock())
        self._set()

    def heard(self, said_s: float) -> None:
        self._tether.heard(said_s)
        self._set()

    def _set(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(_AT_ONCE_S, self._tether.left_s(tether_clock())))
