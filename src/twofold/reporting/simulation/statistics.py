"""The distributions of a simulation, named once, and the numbers that are said of each."""

from typing import Final

import msgspec

from twofold.request import Phase
from twofold.simulation.histogram import Histogram
from twofold.simulation.result import SimulationResult

PERCENTILES: Final = (50, 90, 95, 99)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """One distribution: its field in `SimulationResult`, and the phases whose modelled times it rests on."""

    label: str
    field: str
    phases: tuple[Phase, ...]

    def of(self, result: SimulationResult) -> Histogram | None:
        """The histogram; None where the run did not measure it."""
        histogram = getattr(result, self.field)
        if histogram is not None and not isinstance(histogram, Histogram):
            raise TypeError(f"{self.field} of a result is no histogram")
        return histogram


_PREFILL, _DECODE, _BOTH = (Phase.PREFILL,), (Phase.DECODE,), (Phase.PREFILL, Phase.DECODE)

LATENCIES: Final = (
    Distribution(label="TTFT", field="ttft_s", phases=_PREFILL),
    Distribution(label="TPOT", field="tpot_s", phases=_DECODE),
    Distribution(label="ITL", field="itl_s", phases=_DECODE),
    Distribution(label="E2E", field="e2e_s", phases=_BOTH),
    Distribution(label="Queue", field="queue_s", phases=_BOTH),
    Distribution(label="KV transfer", field="transfer_s", phases=()),
)
SLOWDOWNS: Final = (
    Distribution(label="TTFT slowdown", field="ttft_slowdown", phases=_PREFILL),
    Distribution(label="TPOT slowdown", field="tpot_slowdown", phases=_DECODE),
    Distribution(label="E2E slowdown", field="e2e_slowdown", phases=_BOTH),
)


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a distribution, in its own unit (seconds, or multiples for a slowdown)."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, histogram: Histogram | None) -> "Statistics | None":
        """The numbers of a histogram; None where it holds nothing."""
        if histogram is None or histogram.count == 0:
            return None
        quantiles = {f"p{percentile}": _known(histogram.percentile(percentile)) for percentile in PERCENTILES}
        return cls(
            count=histogram.count,
            mean=_known(histogram.mean),
            min=_known(histogram.minimum),
            max=_known(histogram.maximum),
            **quantiles,
        )


def _known(value: float | None) -> float:
    """A histogram that counted something has every statistic."""
    if value is None:
        raise TypeError("a histogram that is not empty has no such statistic")
    return value
