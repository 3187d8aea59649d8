"""Service-level objectives (SLOs): latency bounds for each request, or bounds on slowdown percentiles."""

import re
from typing import Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.timeline import Timeline

_UNLIKELY_S: Final = 100.0  # a bound from which a number without a unit was perhaps meant in milliseconds
_TIME: Final = re.compile(r"(?P<number>[^\sms]+)\s*(?P<unit>ms|s|)")
_PER_SECOND: Final = {"": 1.0, "s": 1.0, "ms": 1e3}


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds on the latencies of a request, in seconds; None means no bound. A request meets the SLO if it meets
    every bound. Goodput is the rate of such requests (DistServe, OSDI'24, section 1).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met_by(self, timeline: Timeline) -> bool:
        """Return whether the request completed within every bound."""
        bounds = ((self.ttft_s, timeline.ttft_s), (self.tpot_s, timeline.tpot_s), (self.e2e_s, timeline.e2e_s))
        return timeline.complete and all(bound is None or value is None or value <= bound for bound, value in bounds)

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse bounds such as `ttft=250ms,tpot=0.1s,e2e=30`, in seconds without a unit.

        Raise ConfigurationError if they are invalid, or if a number without a unit is 100 or more.
        """
        bounds: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            key = f"{name.strip().lower()}_s"
            seconds = _seconds(value)
            if key not in cls.__struct_fields__ or key in bounds or not 0 < seconds < float("inf"):
                raise ConfigurationError(f"SLO {part!r} is invalid: write ttft=2,tpot=0.1 or ttft=2s,tpot=100ms")
            if seconds >= _UNLIKELY_S and not value.strip().endswith("s"):
                bound = part.strip()
                raise ConfigurationError(f"SLO {bound!r} has no unit: write {bound}ms or {bound}s")
            bounds[key] = seconds
        return cls(**bounds)


def _seconds(text: str) -> float:
    """Parse a time such as `0.1`, `0.1s` or `100ms`. Return -1 if it is invalid."""
    found = _TIME.fullmatch(text.strip())
    try:
        return -1.0 if found is None else float(found["number"]) / _PER_SECOND[found["unit"]]
    except ValueError:
        return -1.0


class SlowdownSlo(msgspec.Struct, frozen=True, kw_only=True):
    """SLO of a run: upper bounds on slowdowns by percentile, such as {50: 1.25}. A slowdown is a latency divided by the
    latency of the same request alone on a reference machine (Splitwise, ISCA'24, table VI).
    """

    ttft: dict[int, float] = {}
    tpot: dict[int, float] = {}
    e2e: dict[int, float] = {}


# The nine bounds of Splitwise (table VI), relative to an uncontended DGX-A100; its TBT is tpot here.
SPLITWISE: Final = SlowdownSlo(
    ttft={50: 2.0, 90: 3.0, 99: 6.0}, tpot={50: 1.25, 90: 1.5, 99: 5.0}, e2e={50: 1.25, 90: 1.5, 99: 5.0}
)


def parse_slo(text: str) -> Slo | SlowdownSlo:
    """Parse an SLO: bounds such as `ttft=2` or `ttft=250ms`, or `splitwise`, its paper's. Raises ConfigurationError."""
    if text.strip().lower() == "splitwise":
        return SPLITWISE
    slo = Slo.parse(text)
    if slo == Slo():
        raise ConfigurationError("the SLO has no bounds: write ttft=2,tpot=0.1 (seconds), ttft=250ms or splitwise")
    return slo
