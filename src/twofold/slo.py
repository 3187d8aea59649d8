"""Service-level objectives of requests and of whole runs."""

from typing import Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.timeline import Timeline


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """SLO with latency bounds in seconds (None: unbounded). A request meets the SLO if it meets every bound.

    Goodput is the rate of requests that meet the SLO (DistServe, OSDI'24, section 1).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met_by(self, timeline: Timeline) -> bool:
        """Whether the request of this timeline completed within every bound."""
        bounds = ((self.ttft_s, timeline.ttft_s), (self.tpot_s, timeline.tpot_s), (self.e2e_s, timeline.e2e_s))
        return timeline.complete and all(bound is None or value is None or value <= bound for bound, value in bounds)

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse bounds in seconds such as `ttft=2,tpot=0.1,e2e=30`; raises ConfigurationError."""
        bounds: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            key = f"{name.strip().lower()}_s"
            try:
                seconds = float(value)
            except ValueError:
                seconds = -1.0
            if key not in cls.__struct_fields__ or key in bounds or not 0 < seconds < float("inf"):
                raise ConfigurationError(f"SLO {part!r} is invalid: write seconds as in ttft=2,tpot=0.1,e2e=30")
            bounds[key] = seconds
        return cls(**bounds)


class SlowdownSlo(msgspec.Struct, frozen=True, kw_only=True):
    """SLO on slowdowns: an upper bound for each percentile. A run meets the SLO if it meets every bound.

    A slowdown is a latency divided by that of the same request alone on a reference machine. Splitwise (ISCA'24,
    table VI) bounds the P50, P90 and P99.
    """

    ttft: dict[int, float] = {}
    tpot: dict[int, float] = {}
    e2e: dict[int, float] = {}


# The nine bounds of Splitwise (table VI), relative to an uncontended DGX-A100; its TBT is tpot here.
SPLITWISE: Final = SlowdownSlo(
    ttft={50: 2.0, 90: 3.0, 99: 6.0}, tpot={50: 1.25, 90: 1.5, 99: 5.0}, e2e={50: 1.25, 90: 1.5, 99: 5.0}
)


def parse_slo(text: str) -> Slo | SlowdownSlo:
    """Parse the name `splitwise` or bounds in seconds (see `Slo.parse`) to an SLO; raises ConfigurationError."""
    if text.strip().lower() == "splitwise":
        return SPLITWISE
    slo = Slo.parse(text)
    if slo == Slo():
        raise ConfigurationError("the SLO has no bounds: write ttft=2,tpot=0.1 (seconds) or splitwise")
    return slo
