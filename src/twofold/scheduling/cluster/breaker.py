"""A circuit breaker: whether an instance that has failed may be trusted with requests again."""

from enum import StrEnum
from typing import Final

LONGEST_S: Final = 30.0


class BreakerState(StrEnum):
    CLOSED = "closed"  # it is given requests
    OPEN = "open"  # it failed, and is not started again before its time
    HALF_OPEN = "half-open"  # it is back, and one request at a time shows whether it works


class Breaker:
    """closed ─ fail ─▶ open ─ back ─▶ half-open ─ a request gets a token ─▶ closed.

    After each failure it stays open twice as long as the time before, up to `longest_s`; one that was closed for
    `HEALED_S` begins anew. Times are in seconds on the caller's clock.
    """

    FIRST_S: Final = 0.25
    HEALED_S: Final = 60.0

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self.state = BreakerState.CLOSED
        self.failures = 0  # in a row
        self.probe: str | None = None  # the request that shows whether it works
        self._closed_s = 0.0

    @property
    def admits(self) -> bool:
        """Whether a request may go there now."""
        return self.state is BreakerState.CLOSED or (
            self.state is BreakerState.HALF_OPEN and self.probe is None
        )

    def fail(self, now: float) -> float:
        """The instance is gone; returns the time from which it may be started again."""
        if self.state is BreakerState.CLOSED and now - self._closed_s >= self.HEALED_S:
            self.failures = 0
        wait_s = min(self._longest_s, self.FIRST_S * 2.0 ** min(self.failures, 16))
        self.failures += 1
        self.state, self.probe = BreakerState.OPEN, None
        return now + wait_s

    def back(self, now: float) -> None:
        """The instance is there; one that never failed is trusted."""
        if self.failures:
            self.state, self.probe = BreakerState.HALF_OPEN, None
        else:
            self._closed_s = now

    def begin(self, request_id: str) -> bool:
        """A request goes there; True if it is the one that shows whether the instance works."""
        if self.state is not BreakerState.HALF_OPEN or self.probe is not None:
            return False
        self.probe = request_id
        return True

    def succeed(self, request_id: str, now: float) -> bool:
        """The instance made a token of this request; True if that closes the breaker."""
        if self.probe != request_id:
            return False
        self.state, self.probe, self._closed_s = BreakerState.CLOSED, None, now
        return True

    def release(self, request_id: str) -> bool:
        """The request ended before it showed anything; True if it was the one that should have."""
        if self.probe != request_id:
            return False
        self.probe = None
        return True
