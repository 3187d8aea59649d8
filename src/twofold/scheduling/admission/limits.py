"""What a service takes on at once, and what it answers when that is too much. Structs, so not compiled.

What one API key has in the service now, and what it may still ask for.

The pace at which requests end while others wait for them to.
"""

from collections import deque
from enum import StrEnum
from typing import Final

import msgspec


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one API key may ask for; None means no limit.

    `max_concurrent` counts its requests that wait or run. `requests_per_minute` is a token bucket that holds a
    minute's worth: that many may come at once, and then one every 60 / `requests_per_minute` seconds.
    """

    max_concurrent: int | None = None
    requests_per_minute: int | None = None


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on the whole service.

    `max_running` requests are handed to the cluster at once and `max_waiting` wait in front of it. A request that
    names no deadline has `timeout_s` seconds from its arrival, so that nothing waits for ever, whatever its
    priority. `keys` holds the limits of each API key by its name.
    """

    max_running: int = 1024
    max_waiting: int = 1024
    timeout_s: float = 1800.0
    keys: dict[str, KeyLimits] = {}


class RefusalReason(StrEnum):
    """What there was too much of. The last three are those of overload control: work that is there already, or, beyond
    the SLO, the request itself."""

    QUEUE_FULL = "queue-full"
    KEY_LIMIT = "key-limit"
    DEADLINE = "deadline"
    PREFILL_LOAD = "prefill-load"
    DECODE_LOAD = "decode-load"
    BEYOND_SLO = "beyond-slo"


class Refusal(msgspec.Struct, frozen=True):
    """A request is not taken; the same one would be, `retry_after_s` (at least 1) whole seconds from now.

    That is an estimate from how fast requests ended lately. It holds while that goes on and nobody else comes first.
    """

    reason: RefusalReason
    retry_after_s: int


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


_PACE_KEPT: Final = (
    64  # ends that are remembered: enough to even out single requests, few enough to forget an hour ago
)


class CompletionRate:
    """Remembers the gaps between the latest ends, and from them tells how long the next ones take.

    Only time counts in which the service was saturated: how often requests end when few come says nothing about
    how often they would if many waited. The gap that is still open counts as soon as it is the longest, so a service
    that stalls is not remembered as fast.
    """

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_PACE_KEPT)
        self._open = 0.0
        self._at = 0.0
        self._saturated = False

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return len(self._gaps) > 0

    def ended(self, now: float) -> None:
        """A request ended."""
        self._advance(now)
        if self._saturated:
            self._gaps.append(self._open)
            self._open = 0.0

    def saturated(self, saturated: bool, now: float) -> None:
        """From now on, a request that came would have to wait, or would not."""
        self._advance(now)
        self._saturated = saturated

    def mean_gap_s(self, now: float) -> float:
        """Seconds from one end to the next, on average."""
        gaps = self._recent(now)
        return sum(gaps, 0.0) / len(gaps)

    def time_for(self, ends: int, now: float) -> float:
        """Seconds in which `ends` requests end, taken from the slowest stretch of that many in memory.

        The slowest and not the mean: ends come in bursts where requests are batched, and a promise made from the
        mean would be broken between two bursts. Before anything has ended it is as long as that has been waited for.
        """
        gaps = self._recent(now)
        if not self._gaps:
            return gaps[0] if ends else 0.0
        rounds, rest = divmod(ends, len(gaps))
        return rounds * sum(gaps, 0.0) + _slowest(gaps, rest)

    def _advance(self, now: float) -> None:
        if self._saturated:
            self._open += max(0.0, now - self._at)
        self._at = now

    def _recent(self, now: float) -> list[float]:
        """At least one gap."""
        gaps = list(self._gaps)
        still_open = self._open + (max(0.0, now - self._at) if self._saturated else 0.0)
        if not gaps or still_open > max(gaps):
            gaps.append(still_open)
        return gaps


def _slowest(gaps: list[float], count: int) -> float:
    """The largest sum of `count` neighbouring gaps, of which there are at least that many."""
    window = slowest = sum(gaps[:count], 0.0)
    for entering, leaving in zip(gaps[count:], gaps, strict=False):
        window += entering - leaving
        slowest = max(slowest, window)
    return slowest
