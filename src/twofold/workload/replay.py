"""Replaying a trace: which part of it, and how fast."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from twofold.errors import ConfigurationError
from twofold.request import Request
from twofold.workload.rescale import first, require_positive, scale_rate, to_rate, window


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A part of a trace at its own times, or at those times rescaled.

    `start_s` is a moment of the trace as it is; it becomes 0. From there on at most `num_requests` are taken.
    `rate_scale` makes arrivals that many times as frequent; `rate` scales them to that many requests per
    second on average over the part that is taken. `duration_s` counts seconds of the result: together with
    `rate` it takes the first `rate * duration_s` requests, otherwise those that arrive before it ends.
    """

    start_s: float = 0.0
    duration_s: float | None = None
    num_requests: int | None = None
    rate: float | None = None
    rate_scale: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be before anything is read."""
        if self.rate is not None and self.rate_scale is not None:
            raise ConfigurationError("give either a rate or a rate scale, not both")
        if self.rate is not None:
            require_positive("rate", self.rate)
        if self.rate_scale is not None:
            require_positive("rate scale", self.rate_scale)
        window((), self.start_s, self.duration_s)
        first((), self.num_requests)

    def requests(self, reopen: Callable[[], Iterator[Request]]) -> Iterator[Request]:
        """The requests, as a stream; `reopen` gives the whole trace, from its first request on, each time."""
        if self.rate is not None:
            scaled = to_rate(lambda: self._part(reopen), self.rate)
        else:
            scaled = scale_rate(self._part(reopen), self.rate_scale or 1.0)
        return window(scaled, 0.0, self.duration_s)

    def _part(self, reopen: Callable[[], Iterator[Request]]) -> Iterator[Request]:
        count = self.num_requests
        if self.rate is not None and self.duration_s is not None:
            # A hair more, so that 0.1 requests/s for 30 s are three and not two.
            fitting = max(1, math.floor(self.rate * self.duration_s * (1 + 1e-12)))
            count = fitting if count is None else min(count, fitting)
        return first(window(reopen(), self.start_s), count)
