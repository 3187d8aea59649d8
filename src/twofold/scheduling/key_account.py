"""What one API key has in the service now, and what it may still ask for."""

from collections import deque
from typing import Final

from twofold.scheduling.admission_limits import KeyLimits

_KEPT: Final = 16  # stays that are remembered
_ALMOST_ONE: Final = 1.0 - 1e-9  # a token that refilled in steps is one, whatever rounding left of it


class KeyAccount:
    """The requests of a key from when each was taken until it ended, and its bucket of requests per minute."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.waiting = 0
        self._max_concurrent = limits.max_concurrent
        self._per_minute = limits.requests_per_minute
        self._since: dict[str, float] = {}  # in the order in which they were taken
        self._stays: deque[float] = deque(maxlen=_KEPT)
        self._tokens = 0.0 if self._per_minute is None else float(self._per_minute)
        self._refilled_at = now

    @property
    def running(self) -> int:
        return len(self._since) - self.waiting

    def take(self, request_id: str, now: float) -> None:
        """A request was taken: it waits."""
        self._refill(now)
        self._tokens -= 1.0
        self._since[request_id] = now
        self.waiting += 1

    def release(self, request_id: str, now: float, completed: bool) -> None:
        """A request left; if it was `completed` rather than given up, the time that it took is remembered."""
        since = self._since.pop(request_id)
        if completed:
            self._stays.append(now - since)

    def wait_s(self, now: float) -> float:
        """Seconds until one more request may come; 0.0 where one may come now."""
        return max(self._until_slot(now), self._until_token(now))

    def _until_slot(self, now: float) -> float:
        """Until the oldest request is expected to end.

        As long as the slowest stay in memory says; one that has outlasted it is given as long again as it took so far.
        """
        if self._max_concurrent is None or len(self._since) < self._max_concurrent:
            return 0.0
        age = now - next(iter(self._since.values()))
        left = max(self._stays, default=0.0) - age
        return max(left if left > 0.0 else age, 1.0)

    def _until_token(self, now: float) -> float:
        if self._per_minute is None:
            return 0.0
        self._refill(now)
        return 0.0 if self._tokens >= _ALMOST_ONE else (1.0 - self._tokens) * 60.0 / self._per_minute

    def _refill(self, now: float) -> None:
        if self._per_minute is not None:
            gained = (now - self._refilled_at) * self._per_minute / 60.0
            self._tokens = min(float(self._per_minute), self._tokens + max(0.0, gained))
        self._refilled_at = now
