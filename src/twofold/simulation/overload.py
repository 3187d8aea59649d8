"""Overload control in the simulator."""

import statistics
from collections import Counter

import msgspec

from twofold.cluster.timing import PS
from twofold.events import PlacedRequest
from twofold.scheduling.admission.overload import OverloadControl
from twofold.simulation.series import Series

PREFILL, DECODE = "load/prefill", "load/decode"


class OverloadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of overload control: rejections by reason, prompt tokens of requests rejected after their prefill, and
    Pearson's correlation of prefill and decode load over time.
    """

    rule: str
    refusals: dict[str, int]
    wasted_prefill_tokens: int
    load_correlation: float | None  # near −1 if phases are busy in turn; None if a load is constant


class SimulatedOverload:
    """Applies overload control to a simulation, and records rejections and loads over time."""

    def __init__(self, rule: str, control: OverloadControl) -> None:
        self.series = {PREFILL: Series(), DECODE: Series()}
        self.control = control
        self._rule = rule
        self._refusals: Counter[str] = Counter()
        self._wasted_tokens = 0

    def rejection(self, placed: PlacedRequest, now: int) -> str | None:
        """Return the reason to reject a request that arrives at picosecond `now`, or None to accept it."""
        now_s = now / PS
        for name, load in zip((PREFILL, DECODE), self.control.ledger.loads(now_s), strict=True):
            self.series[name].set(now, load)
        reason = self.control.rejection(placed, now_s)
        if reason is None:
            return None
        self._refusals[reason.value] += 1
        return reason.value

    def admits_decode(self, request_id: str, now: int) -> bool:
        """Return whether a request may decode after its prefill has ended at picosecond `now`."""
        reason = self.control.admit_decode(request_id, now / PS)
        if reason is None:
            return True
        self._wasted_tokens += self.control.ledger.computed_tokens(request_id)
        self._refusals[f"{reason.value}-after-prefill"] += 1
        return False

    def result(self) -> OverloadResult:
        return OverloadResult(
            rule=self._rule,
            refusals=dict(sorted(self._refusals.items())),
            wasted_prefill_tokens=self._wasted_tokens,
            load_correlation=correlation(self.series[PREFILL], self.series[DECODE]),
        )


def correlation(one: Series, other: Series) -> float | None:
    """Return Pearson's correlation of two series with equal time bins; None if either is constant."""
    means = [[mean for _, mean, _ in series.points()] for series in (one, other)]
    try:
        return statistics.correlation(*means)
    except statistics.StatisticsError:
        return None
