"""Trials and evaluations: a trial is one simulation of a design at a rate; its evaluation is the result."""

from collections.abc import Awaitable, Callable

import msgspec

from twofold.planning.design import Design
from twofold.request import Phase
from twofold.simulation.result import Check, PoolResult


class Trial(msgspec.Struct, frozen=True):
    """One simulation of a design at a rate (requests/s)."""

    design: Design
    rate: float
    draw: int = 0  # number of the random draw of the workload


class LatencyPercentiles(msgspec.Struct, frozen=True, kw_only=True):
    """P50, P90 and P99 of a latency, in seconds."""

    p50: float
    p90: float
    p99: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulation: SLO checks, latencies and energy."""

    met: bool
    checks: tuple[Check, ...]
    bound_by: Phase | None = None  # phase closest to missing the SLO; None if undetermined
    stopped: bool = False  # early, because the SLO was out of reach: all numbers cover only the simulated part
    requests: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0
    energy_j: float = 0.0
    ttft_s: LatencyPercentiles | None = None
    tpot_s: LatencyPercentiles | None = None
    e2e_s: LatencyPercentiles | None = None
    longest_prompt: int = 0  # tokens, of the completed requests
    slo_scale: float | None = None  # smallest factor by which all bounds could be multiplied with the SLO still met
    pools: tuple[PoolResult, ...] = ()

    @property
    def mean_power_w(self) -> float:
        return self.energy_j / self.duration_s if self.duration_s else 0.0


class SimulatedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulation, with the CPU time of the simulation in seconds."""

    evaluation: Evaluation
    cpu_s: float


# Evaluates a design at a rate. Searches assume that more machines or a lower rate never lead to an SLO miss.
Evaluate = Callable[[Trial], Awaitable[Evaluation]]
