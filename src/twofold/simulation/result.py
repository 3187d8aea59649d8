"""What a simulation says: counts, distributions, series, energy and cost, not sized by its trace.

The verdict on a run: whether a cluster kept its service-level objectives, bound by bound.
"""

from collections.abc import Iterator

import msgspec

from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.performance.cost import ModelAccuracy
from twofold.simulation.histogram import Histogram
from twofold.simulation.overload import OverloadResult
from twofold.simulation.reuse_statistics import ReuseResult
from twofold.simulation.series import Series
from twofold.slo import Slo, SlowdownSlo


class PoolResult(msgspec.Struct, frozen=True, kw_only=True):
    """One pool over the run. Power is drawn by all of its machines; `utilization` is the share of instance time
    in which a batch ran, and of a pipeline the share of its stages' time."""

    role: str
    machine: str
    machines: int
    instances: int
    utilization: float
    energy_j: float
    mean_batch: float | None
    performance: str
    error: ModelAccuracy


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies are seconds; slowdowns are multiples of the uncontended reference (None without one).

    arrived = completed + rejected + failed + unfinished. `itl_s` counts every gap between tokens. `slo_met`
    counts completed requests that met every bound of the SLO jointly (None without one). `slo_scale` has, for each
    completed request, by what the bounds would have to be multiplied so that it just meets them all. `duration_s` runs
    from the first arrival to the end of the last request, `arrival_s` to the last arrival. `swaps` counts sequences
    that were swapped out, each time, and `swap_bytes` what went out and back. `reuse` says what came of prefix caches,
    where there are any. `series` are named `queue/ROLE`, `batch/ROLE`, `pool/ROLE` (instances now working as that
    role) and `power_w`.
    `overload` is there where overload control was asked for; the series then have `load/prefill` and `load/decode` too.
    """

    spec: ClusterSpec
    arrived: int
    completed: int
    rejected: int
    failed: int
    unfinished: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    arrival_s: float
    ttft_s: Histogram
    tpot_s: Histogram
    itl_s: Histogram
    e2e_s: Histogram
    queue_s: Histogram
    transfer_s: Histogram
    ttft_slowdown: Histogram | None
    tpot_slowdown: Histogram | None
    e2e_slowdown: Histogram | None
    slo_met: int | None
    slo_scale: Histogram | None = None
    preemptions: int
    swaps: int = 0
    swap_bytes: int = 0
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

    def attainment_at(self, scale: float) -> float | None:
        """The share of all requests that meet the SLO with its bounds times `scale` (DistServe section 6.2)."""
        if self.slo_scale is None or not self.arrived:
            return None
        return (self.slo_scale.fraction_at_most(scale) or 0.0) * self.completed / self.arrived

    def tightest_scale(self, attainment: float) -> float | None:
        """The least scale of the SLO that this share of all requests meets; None where too few completed."""
        needed = attainment * self.arrived
        if self.slo_scale is None or not 0 < needed <= self.completed:
            return None
        return self.slo_scale.percentile(100 * needed / self.completed)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One bound and what the run had of it.

    `value` is None where nothing was there to measure, as TPOT is where every output has one token: such a
    bound is kept. `at_least` marks a floor; every other bound is a ceiling.
    """

    name: str
    value: float | None
    bound: float
    met: bool
    at_least: bool = False


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`met` when every one of `checks` is."""

    met: bool
    checks: tuple[Check, ...]


def verdict(result: SimulationResult, slo: Slo | SlowdownSlo, attainment: float = 0.9) -> Verdict:
    """Judge a run.

    For an `Slo`, the share of all requests that completed within every bound must be at least `attainment`:
    those that were rejected, failed or did not end are misses. For a `SlowdownSlo` every percentile must be at
    most its bound, and every request must have completed; `attainment` plays no part.

    Raises ConfigurationError where the run did not measure what the SLO speaks of, or `attainment` is no share.
    """
    if not 0.0 < attainment <= 1.0:
        raise ConfigurationError(
            f"attainment {attainment:g} is no share of requests: give more than 0, at most 1"
        )
    checks = (
        (_attained(result, attainment),) if isinstance(slo, Slo) else tuple(_slowdown_checks(result, slo))
    )
    return Verdict(met=all(check.met for check in checks), checks=checks)


def _attained(result: SimulationResult, attainment: float) -> Check:
    if result.slo_met is None:
        raise ConfigurationError("this run counted no SLO: give the SLO to the simulation as well")
    return _floor("requests within the SLO", _share(result.slo_met, result.arrived), attainment)


def _slowdown_checks(result: SimulationResult, slo: SlowdownSlo) -> Iterator[Check]:
    for name, bounds, histogram in (
        ("TTFT", slo.ttft, result.ttft_slowdown),
        ("TPOT", slo.tpot, result.tpot_slowdown),
        ("E2E", slo.e2e, result.e2e_slowdown),
    ):
        for percentile, bound in sorted(bounds.items()):
            yield _ceiling(f"{name} slowdown P{percentile}", histogram, percentile, bound)
    yield _floor("requests completed", _share(result.completed, result.arrived), 1.0)


def _ceiling(name: str, histogram: Histogram | None, percentile: int, bound: float) -> Check:
    if histogram is None:
        raise ConfigurationError("this run has no slowdowns: give the simulation a reference machine")
    value = histogram.percentile(percentile)
    return Check(name=name, value=value, bound=bound, met=value is None or value <= bound)


def _floor(name: str, value: float, bound: float) -> Check:
    return Check(name=name, value=value, bound=bound, met=value >= bound, at_least=True)


def _share(part: int, whole: int) -> float:
    """A run without requests has shown nothing, so its share is 0."""
    return part / whole if whole else 0.0
