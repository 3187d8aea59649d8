"""Result of a simulation, and its check against an SLO."""

import msgspec

from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError, require
from twofold.performance.cost import ModelAccuracy
from twofold.simulation.histogram import Histogram
from twofold.simulation.overload import OverloadResult
from twofold.simulation.reuse import ReuseResult
from twofold.simulation.series import Series
from twofold.slo import Slo, SlowdownSlo


class PoolResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one pool. `utilization` is the share of time in which its instances ran batches, and `mean_batch` the
    mean number of sequences in a batch.
    """

    role: str
    machine: str
    machines: int
    instances: int
    utilization: float
    energy_j: float
    mean_batch: float | None
    performance: str
    error: ModelAccuracy


class SteadyState(msgspec.Struct, frozen=True, kw_only=True):
    """Requests completed, output tokens and requests within the SLO per second in the second half of the arrivals, when
    the cluster has filled up and does not drain yet.
    """

    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float | None


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, latency distributions, time series, energy and cost of a simulation run.

    `series` contains these time series (ROLE is prefill, decode or mixed):

    - `power_w`: power in watts
    - `queue/ROLE`: number of queued sequences
    - `batch/ROLE`: number of sequences in running batches
    - `pool/ROLE`: number of instances
    """

    spec: ClusterSpec
    arrived: int
    completed: int
    rejected: int
    failed: int
    unfinished: int
    prompt_tokens: int
    output_tokens: int
    longest_request: int = 0  # tokens, of those completed
    longest_prompt: int = 0  # tokens, of those completed
    max_context: int | None = None  # tokens that the model supports, if known
    duration_s: float  # from the first arrival to the end of the last request
    arrival_s: float  # from the first to the last arrival
    ttft_s: Histogram
    tpot_s: Histogram
    itl_s: Histogram
    e2e_s: Histogram
    queue_s: Histogram
    transfer_s: Histogram
    visible_transfer_s: Histogram  # after the first token
    ttft_slowdown: Histogram | None  # latency relative to that of the same request alone on a reference machine
    tpot_slowdown: Histogram | None
    e2e_slowdown: Histogram | None
    slo_met: int | None  # completed requests within the SLO
    slo_scale: Histogram | None = None  # smallest factor of the SLO's bounds with which a request meets it
    steady: SteadyState | None = None  # None for runs that are too short
    preemptions: int
    swaps: int = 0
    swap_bytes: int = 0  # in both directions
    handoffs: int
    pools: tuple[PoolResult, ...]
    series: dict[str, Series]
    energy_j: float
    price_per_h: float
    tdp_w: float
    events: int
    iterations: int
    cpu_s: float
    overload: OverloadResult | None = None
    reuse: ReuseResult | None = None

    @property
    def mean_power_w(self) -> float:
        return self.energy_j / self.duration_s if self.duration_s else 0.0

    def tightest_scale(self, attainment: float) -> float | None:
        """Return the smallest factor of all SLO bounds at which `attainment` is reached; None if none is enough."""
        needed = attainment * self.arrived
        if self.slo_scale is None or not 0 < needed <= self.completed:
            return None
        return self.slo_scale.percentile(100 * needed / self.completed)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of a measured value (None: no data) with an SLO bound. `at_least` marks a lower bound."""

    name: str
    value: float | None
    bound: float
    met: bool
    at_least: bool = False


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a run met its SLO, and the check of each bound."""

    met: bool
    checks: tuple[Check, ...]


def verdict(result: SimulationResult, slo: Slo | SlowdownSlo, attainment: float = 0.9) -> Verdict:
    """Check the result of a simulation against an SLO. An `Slo` must be met by at least the fraction `attainment` of
    all arrived requests. For a `SlowdownSlo`, all requests must complete, and all percentiles must be within their
    bounds. Raise ConfigurationError for an invalid `attainment` or missing data.
    """
    require(0.0 < attainment <= 1.0, f"attainment must be more than 0 and at most 1, not {attainment:g}")
    checks: list[Check] = []
    if isinstance(slo, Slo):
        if result.slo_met is None:
            raise ConfigurationError("the run did not count the SLO: pass the SLO to the simulation")
        checks.append(_share_check("requests within the SLO", result.slo_met, result.arrived, attainment))
    else:
        latencies = (
            ("TTFT", slo.ttft, result.ttft_slowdown),
            ("TPOT", slo.tpot, result.tpot_slowdown),
            ("E2E", slo.e2e, result.e2e_slowdown),
        )
        for name, bounds, histogram in latencies:
            for percentile, bound in sorted(bounds.items()):
                if histogram is None:
                    raise ConfigurationError("the run has no slowdowns: pass a reference to the simulation")
                value = histogram.percentile(percentile)
                met = value is None or value <= bound
                checks.append(Check(name=f"{name} slowdown P{percentile}", value=value, bound=bound, met=met))
        checks.append(_share_check("requests completed", result.completed, result.arrived, 1.0))
    return Verdict(met=all(check.met for check in checks), checks=tuple(checks))


def _share_check(name: str, part: int, whole: int, bound: float) -> Check:
    value = part / whole if whole else 0.0
    return Check(name=name, value=value, bound=bound, met=value >= bound, at_least=True)
