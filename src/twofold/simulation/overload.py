"""Overload control of a virtual cluster: who is refused, what was prefilled in vain, and loads over time."""

from math import sqrt

import msgspec

from twofold.cluster.timing import PS
from twofold.request import Request
from twofold.scheduling.admission.ledger import PlacedRequest
from twofold.scheduling.admission.overload import OverloadControl
from twofold.scheduling.cluster.router import Route
from twofold.simulation.series import Series

PREFILL, DECODE = "load/prefill", "load/decode"


class OverloadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule refused, by reason, and the prompt tokens whose prefill came to nothing because of that.

    `load_correlation` is that of prefill load and decode load over time, as Pearson defines it: −1 where one phase is
    idle whenever the other is full. None where one of them never changed.
    """

    rule: str
    refusals: dict[str, int]
    wasted_prefill_tokens: int
    load_correlation: float | None


class SimulatedOverload:
    """Drives overload control as a live service does, and looks at the loads whenever a request arrives."""

    def __init__(self, rule: str, control: OverloadControl) -> None:
        self.series = {PREFILL: Series(), DECODE: Series()}
        self._rule, self._control = rule, control
        self._refusals: dict[str, int] = {}
        self._wasted_tokens = 0

    def admits(self, request: Request, route: Route, now: int) -> bool:
        """Whether a request is taken that arrives at picosecond `now`, and would run there."""
        now_s = now / PS
        for name, load in zip((PREFILL, DECODE), self._control.ledger.loads(now_s), strict=True):
            self.series[name].set(now, load)
        newcomer = PlacedRequest.of(request, route)
        reason = self._control.arrival(newcomer, now_s)
        if reason is None:
            self._control.placed(newcomer, now_s)
            return True
        self._refusals[reason.value] = self._refusals.get(reason.value, 0) + 1
        return False

    def decodes(self, request: Request, now: int) -> bool:
        """Whether a request, which is prefilled now, is taken where it is to be decoded."""
        reason = self._control.prefilled(request.id, now / PS)
        if reason is None:
            return True
        self._wasted_tokens += self._control.ledger.computed_tokens(request.id)
        self._control.ended(request.id, now / PS)
        after = f"{reason.value}-after-prefill"
        self._refusals[after] = self._refusals.get(after, 0) + 1
        return False

    def ended(self, request: Request, now: int, *, complete: bool) -> None:
        """A request that was taken is over."""
        self._control.ended(request.id, now / PS, request.output_tokens if complete else None)

    def result(self) -> OverloadResult:
        return OverloadResult(
            rule=self._rule,
            refusals=dict(sorted(self._refusals.items())),
            wasted_prefill_tokens=self._wasted_tokens,
            load_correlation=correlation(self.series[PREFILL], self.series[DECODE]),
        )


def correlation(one: Series, other: Series) -> float | None:
    """Pearson's, of the means over the bins of two series that were set at the same times."""
    pairs = [
        (mean, others) for (_, mean, _), (_, others, _) in zip(one.points(), other.points(), strict=True)
    ]
    count = len(pairs)
    if not count:
        return None
    mean_one, mean_other = sum(a for a, _ in pairs) / count, sum(b for _, b in pairs) / count
    spread_one = sum((a - mean_one) ** 2 for a, _ in pairs)
    spread_other = sum((b - mean_other) ** 2 for _, b in pairs)
    if not spread_one or not spread_other:
        return None
    together = sum((a - mean_one) * (b - mean_other) for a, b in pairs)
    return together / sqrt(spread_one * spread_other)
