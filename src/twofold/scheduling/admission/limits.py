"""Admission limits of the service and of API keys, the current usage of each key, and estimated waiting times."""

from collections import deque
from enum import StrEnum
from typing import Final

import msgspec


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one API key; None means unlimited."""

    max_concurrent: int | None = None  # waiting and running requests
    requests_per_minute: int | None = None  # by a token bucket with room for one minute of requests


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the whole service and of each API key."""

    max_running: int = 1024  # in the cluster
    max_waiting: int = 1024  # in the queue
    timeout_s: float = 1800.0  # default deadline after arrival
    keys: dict[str, KeyLimits] = {}


class RefusalReason(StrEnum):
    """Reasons why admission control refuses a request."""

    QUEUE_FULL = "queue-full"
    KEY_LIMIT = "key-limit"
    DEADLINE = "deadline"
    PREFILL_LOAD = "prefill-load"
    DECODE_LOAD = "decode-load"
    BEYOND_SLO = "beyond-slo"  # the request would miss the SLO on an idle cluster


class Refusal(msgspec.Struct, frozen=True):
    """Refusal of a request: the reason, and the estimated seconds until a retry succeeds."""

    reason: RefusalReason
    retry_after_s: int  # at least 1, at the recent completion rate and without new requests


_KEPT_DURATIONS: Final = 16
_KEPT_GAPS: Final = 64  # averages out single requests and forgets an hour ago
_ALMOST_ONE: Final = 1.0 - 1e-9  # a bucket token refilled in steps, less rounding errors


class KeyAccount:
    """Account of one API key: its waiting and running requests, and a token bucket for its request rate."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.waiting = 0
        self._max_concurrent = limits.max_concurrent
        self._per_minute = limits.requests_per_minute
        self._since: dict[str, float] = {}  # admission time by request, in that order
        self._durations: deque[float] = deque(maxlen=_KEPT_DURATIONS)
        self._tokens = 0.0 if self._per_minute is None else float(self._per_minute)
        self._refilled_at = now

    @property
    def running(self) -> int:
        return len(self._since) - self.waiting

    def take(self, request_id: str, now: float) -> None:
        """Count a newly queued request as waiting, and take a token from the token bucket."""
        self._refill(now)
        self._tokens -= 1.0
        self._since[request_id] = now
        self.waiting += 1

    def release(self, request_id: str, now: float, completed: bool) -> None:
        """Remove a request. If it is `completed`, its duration is used in later estimates of waiting times."""
        since = self._since.pop(request_id)
        if completed:
            self._durations.append(now - since)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the API key may send another request; 0.0 if it may send one now."""
        token_s = 0.0
        if self._per_minute is not None:
            self._refill(now)
            token_s = 0.0 if self._tokens >= _ALMOST_ONE else (1.0 - self._tokens) * 60.0 / self._per_minute
        return max(self._until_slot(now), token_s)

    def _until_slot(self, now: float) -> float:
        """Estimate the seconds until the API key has fewer than `max_concurrent` requests."""
        if self._max_concurrent is None or len(self._since) < self._max_concurrent:
            return 0.0
        # The oldest request should last as long as the slowest recent request or, if older already, twice as long as so
        # far.
        age = now - next(iter(self._since.values()))
        left = max(self._durations, default=0.0) - age
        return max(left if left > 0.0 else age, 1.0)

    def _refill(self, now: float) -> None:
        if self._per_minute is not None:
            gained = (now - self._refilled_at) * self._per_minute / 60.0
            self._tokens = min(float(self._per_minute), self._tokens + max(0.0, gained))
        self._refilled_at = now


class CompletionRate:
    """Estimator of waiting times, from the recent gaps between request completions."""

    def __init__(self) -> None:
        # Only saturated time counts: at low load, arrivals limit the completion rate.
        self._gaps: deque[float] = deque(maxlen=_KEPT_GAPS)
        self._open = 0.0
        self._at = 0.0
        self._saturated = False

    @property
    def known(self) -> bool:
        """Whether a gap between completions has been measured."""
        return len(self._gaps) > 0

    def add(self, now: float) -> None:
        self._advance(now)
        if self._saturated:
            self._gaps.append(self._open)
            self._open = 0.0

    def set_saturated(self, saturated: bool, now: float) -> None:
        """Record whether new requests must wait because the service is saturated."""
        self._advance(now)
        self._saturated = saturated

    def mean_gap_s(self, now: float) -> float:
        """Return the mean of the recent gaps between completions in seconds."""
        gaps = self._recent(now)
        return sum(gaps, 0.0) / len(gaps)

    def time_for(self, ends: int, now: float) -> float:
        """Estimate the seconds until N more requests have completed, where N is `ends`."""
        # The longest time that so many successive completions took recently: a mean would be too low, because batched
        # requests complete in bursts. Before the first completion, the time since the service became saturated.
        gaps = self._recent(now)
        if not self._gaps:
            return gaps[0] if ends else 0.0
        rounds, rest = divmod(ends, len(gaps))
        window = slowest = sum(gaps[:rest], 0.0)
        for entering, leaving in zip(gaps[rest:], gaps, strict=False):
            window += entering - leaving
            slowest = max(slowest, window)
        return rounds * sum(gaps, 0.0) + slowest

    def _advance(self, now: float) -> None:
        if self._saturated:
            self._open += max(0.0, now - self._at)
        self._at = now

    def _recent(self, now: float) -> list[float]:
        """Return the recent gaps between completions in seconds."""
        gaps = list(self._gaps)
        still_open = self._open + (max(0.0, now - self._at) if self._saturated else 0.0)
        if not gaps or still_open > max(gaps):  # a stall raises the estimate
            gaps.append(still_open)
        return gaps
