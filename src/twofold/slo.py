"""Service-level objectives (SLOs): latency bounds for each request, or bounds on slowdown percentiles."""

from typing import Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.timeline import Timeline


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
        """Parse bounds in seconds, such as `ttft=2,tpot=0.1,e2e=30`. Raise ConfigurationError if they are invalid."""
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
    """Parse an SLO: bounds in seconds (`ttft=2`), or `splitwise` for the SLO of the Splitwise paper.

    Raise ConfigurationError if `text` is invalid.
    """
    if text.strip().lower() == "splitwise":
        return SPLITWISE
    slo = Slo.parse(text)
    if slo == Slo():
        raise ConfigurationError("the SLO has no bounds: write ttft=2,tpot=0.1 (seconds) or splitwise")
    return slo
