"""What a simulation says: counts, distributions, series, energy and cost, not sized by its trace."""

import msgspec

from twofold.performance.base import ModelError
from twofold.simulation.histogram import Histogram
from twofold.simulation.overload import OverloadResult
from twofold.simulation.reuse_statistics import ReuseResult
from twofold.simulation.series import Series
from twofold.simulation.spec import ClusterSpec


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
    error: ModelError


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
