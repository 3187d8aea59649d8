"""Trials and evaluations: a trial simulates a design at a rate, and its evaluation shows whether the SLO is met."""

from typing import Protocol

import msgspec

from twofold.planning.design import Design, Family
from twofold.request import Phase
from twofold.simulation.result import Check, PoolResult


class Trial(msgspec.Struct, frozen=True):
    """One simulation in a search: a design at a rate (requests per second), with one random draw of the workload."""

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

    `bound_by` is the phase that is closest to missing the SLO, or None if undetermined. If `stopped` is set, the
    simulation ended early because the design could no longer meet the SLO, and all numbers cover only the simulated
    part. `checks` has the checks of the SLO; for an SLO in seconds, it also has a check of each latency at the required
    percentile. `slo_scale` is the smallest factor such that the design meets an SLO with all bounds multiplied by this
    factor.
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
    """Interface for evaluating trials.

    Searches assume that a design that meets the SLO still meets it with more machines or at a lower rate.
    """

    async def __call__(self, trial: Trial) -> Evaluation: ...


class UpperBound(Protocol):
    """Interface for analytic bounds on a design's highest rate, in requests per second."""

    def upper(self, design: Design) -> float:
        """Return an upper bound on the design's highest rate: above this rate, the design cannot meet the SLO."""
        ...

    def estimate(self, design: Design) -> float:
        """Return an approximation of the design's highest rate, from which a search can start."""
        ...

    def suggest(self, family: Family, rate: float) -> tuple[int, ...]:
        """Return approximately how many machines of each kind of the family are needed for `rate`, at least 1 each."""
        ...
