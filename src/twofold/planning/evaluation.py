"""What the searches ask and are told: whether a design keeps the SLO at a rate, and by how much."""

from typing import Protocol

import msgspec

from twofold.planning.design import Design, Family
from twofold.request import Phase
from twofold.simulation.result import Check, PoolResult


class Trial(msgspec.Struct, frozen=True):
    """A design under `rate` requests per second, in one of the random draws of the workload."""

    design: Design
    rate: float
    draw: int = 0


class LatencyPercentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles in seconds."""

    p50: float
    p90: float
    p99: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation said of a trial.

    `bound_by` is the phase that was, or would be first, in the way of the SLO; None where that cannot be told.
    A `stopped` simulation ended as soon as the SLO could no longer be met: its numbers cover what ran till then.
    Latencies are None where nothing was measured. `checks` are those of the verdict and, for an SLO in seconds,
    the percentile of each latency that must be within its bound for enough requests to keep all of them. `slo_scale`
    is by what such an SLO could be multiplied and still be kept by enough of them.
    """

    met: bool
    checks: tuple[Check, ...]
    bound_by: Phase | None = None
    stopped: bool = False
    requests: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0
    energy_j: float = 0.0
    ttft_s: LatencyPercentiles | None = None
    tpot_s: LatencyPercentiles | None = None
    e2e_s: LatencyPercentiles | None = None
    slo_scale: float | None = None
    pools: tuple[PoolResult, ...] = ()

    @property
    def mean_power_w(self) -> float:
        return self.energy_j / self.duration_s if self.duration_s else 0.0


class SimulatedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation and the CPU time that it took, which is no part of the result."""

    evaluation: Evaluation
    cpu_s: float


class Evaluate(Protocol):
    """Answers a trial; equal trials get equal answers, and more machines or a lower rate never hurt."""

    async def __call__(self, trial: Trial) -> Evaluation: ...


class UpperBound(Protocol):
    """Bounds a design's rate from above without a simulation, in requests per second."""

    def upper(self, design: Design) -> float:
        """No queueing can make it more than this."""
        ...

    def estimate(self, design: Design) -> float:
        """About what it will be: where a search begins."""
        ...

    def suggest(self, family: Family, rate: float) -> tuple[int, ...]:
        """About how many machines of each kind it will take for `rate`: at least one of each."""
        ...
