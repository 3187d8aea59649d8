"""Says when a machine is too busy to keep the time of what it emulates."""

import logging

from twofold.simulation.kernel import PS

log = logging.getLogger(__name__)

_TOLERATED = PS // 20
_EVERY = 10 * PS


class Lateness:
    """How late batches end. Warns when it is much, and not more often than every ten seconds."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._said: int | None = None

    def note(self, now: int, due: int) -> None:
        """A batch that was to end at picosecond `due` has ended at `now`."""
        late = now - due
        if late > _TOLERATED and (self._said is None or now - self._said > _EVERY):
            self._said = now
            log.warning(
                "%s ended a batch %.0f ms late: this machine is too busy for all that it emulates",
                self._instance,
                late / PS * 1e3,
            )
