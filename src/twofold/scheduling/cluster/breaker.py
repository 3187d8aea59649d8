"""Circuit breaker that stops routing to a failing instance."""

from enum import StrEnum
from typing import Final

LONGEST_S: Final = 30.0


class BreakerState(StrEnum):
    CLOSED = "closed"  # receives requests
    OPEN = "open"  # failed; waits for its restart
    HALF_OPEN = "half-open"  # restarted; receives one request at a time as a probe


class Breaker:
    """Circuit breaker of an instance, with the states closed, open and half-open.

    A failure of the instance opens the breaker. A restart of the instance makes the breaker half-open: the
    instance gets one request at a time, as a probe. A probe that produces a token closes the breaker. The delay
    before a restart doubles with every consecutive failure, up to a limit.
    """

    FIRST_S: Final = 0.25  # time in the open state after the first failure
    HEALED_S: Final = 60.0  # time in the closed state after which failures are forgotten

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self.state = BreakerState.CLOSED
        self.failures = 0  # in a row
        self.probe: str | None = None  # the request that tests the instance
        self._closed_s = 0.0

    def fail(self, now: float) -> float:
        """Record a failure of the instance; return the earliest time at which the instance may restart."""
        if self.state is BreakerState.CLOSED and now - self._closed_s >= self.HEALED_S:
            self.failures = 0
        wait_s = min(self._longest_s, self.FIRST_S * 2.0 ** min(self.failures, 16))
        self.failures += 1
        self.state, self.probe = BreakerState.OPEN, None
        return now + wait_s

    def back(self, now: float) -> None:
        """Record that the instance has started. If it had failed before, the breaker becomes half-open."""
        if self.failures:
            self.state, self.probe = BreakerState.HALF_OPEN, None
        else:
            self._closed_s = now

    def begin(self, request_id: str) -> bool:
        """Record that a request was placed on the instance; return True if the request is a probe."""
        if self.state is not BreakerState.HALF_OPEN or self.probe is not None:
            return False
        self.probe = request_id
        return True

    def succeed(self, request_id: str, now: float) -> bool:
        """Record that the instance produced a token of a request; return True if the breaker closes."""
        if self.probe != request_id:
            return False
        self.state, self.probe, self._closed_s = BreakerState.CLOSED, None, now
        return True

    def release(self, request_id: str) -> bool:
        """Record that a request ended without a token; return True if it was the probe."""
        if self.probe != request_id:
            return False
        self.probe = None
        return True
