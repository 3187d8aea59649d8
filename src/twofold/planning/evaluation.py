"""Trials (a design at a rate) and their evaluations (whether the design meets the SLO)."""

from typing import Protocol

import msgspec

from twofold.planning.design import Design, Family
from twofold.request import Phase
from twofold.simulation.result import Check, PoolResult


class Trial(msgspec.Struct, frozen=True):
    """One simulation of a search: a design at a rate (requests per second), with one random draw of the workload."""

    design: Design
    rate: float
    draw: int = 0


class LatencyPercentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Latency percentiles in seconds."""

    p50: float
    p90: float
    p99: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a trial.

    `bound_by` is the phase closest to missing the SLO (None if undetermined). If `stopped`, the simulation ended early
    because the SLO could no longer be met, and all numbers cover only the simulated part. `checks` has the checks
    of the SLO and, for an SLO in seconds, a check of each latency at the required percentile. `slo_scale` is the
    smallest factor by which all SLO bounds can be multiplied and still be met.
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
    """Evaluation of a trial, with the CPU seconds of its simulation."""

    evaluation: Evaluation
    cpu_s: float


class Evaluate(Protocol):
    """Interface for evaluating trials. Searches assume that more machines or a lower rate never worsen the result."""

    async def __call__(self, trial: Trial) -> Evaluation: ...


class UpperBound(Protocol):
    """Interface for analytic bounds on a design's highest rate, in requests per second."""

    def upper(self, design: Design) -> float:
        """Return a rate above which the design cannot meet the SLO."""
        ...

    def estimate(self, design: Design) -> float:
        """Return the approximate highest rate of the design, from which a search starts."""
        ...

    def suggest(self, family: Family, rate: float) -> tuple[int, ...]:
        """Return approximate counts of the family's machine kinds that suffice for `rate`, at least one of each."""
        ...
