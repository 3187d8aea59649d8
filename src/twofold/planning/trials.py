"""Simulation of a design at one rate, which stops early when the SLO can no longer be met."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from msgspec.structs import replace

from twofold.errors import UserError
from twofold.planning.evaluation import Evaluation, LatencyPercentiles, SimulatedTrial, Trial
from twofold.planning.problem import Problem
from twofold.planning.workload import WorkloadArguments
from twofold.request import Phase, Request
from twofold.simulation.histogram import Histogram
from twofold.simulation.result import Check, SimulationResult, verdict
from twofold.simulation.simulate import simulate
from twofold.simulation.statistics import MICRO, RunStatistics
from twofold.slo import Slo, SlowdownSlo

_EVERY = 16  # calls between two checks of histograms, which are expensive
_CLEARLY = 1.001  # beyond a bound, more than histogram rounding


class SloUnreachable:
    """Stop condition of a simulation: True once the requests can no longer meet the SLO."""

    def __init__(self, requests: Sequence[Request], slo: Slo | SlowdownSlo, attainment: float) -> None:
        self._requests = len(requests)
        self._decoding = sum(request.output_tokens > 1 for request in requests)
        self._slo, self._attainment = slo, attainment
        self._looks = 0

    def __call__(self, statistics: RunStatistics) -> bool:
        lost = statistics.rejected + statistics.failed
        if isinstance(self._slo, Slo):
            missed = lost + statistics.completed - statistics.slo_met
            return (self._requests - missed) / self._requests < self._attainment
        self._looks += 1
        return bool(lost) or (self._looks % _EVERY == 0 and self._slow(statistics, self._slo))

    def _slow(self, statistics: RunStatistics, slo: SlowdownSlo) -> bool:
        slowdowns = statistics.slowdowns
        return slowdowns is not None and (
            _beyond(Histogram.of(slowdowns.ttft, 1 / MICRO), slo.ttft, self._requests)
            or _beyond(Histogram.of(slowdowns.tpot, 1 / MICRO), slo.tpot, self._decoding)
            or _beyond(Histogram.of(slowdowns.e2e, 1 / MICRO), slo.e2e, self._requests)
        )


def _beyond(histogram: Histogram, bounds: dict[int, float], total: int) -> bool:
    """Return whether a percentile is certain to exceed its bound, whatever the remaining values are."""
    count = histogram.count
    for percentile, bound in bounds.items():
        needed = total - math.floor((total - 1) * percentile / 100)
        if count >= needed:
            within = histogram.fraction_at_most(bound * _CLEARLY) or 0.0
            if count * (1.0 - within) >= needed:
                return True
    return False


def try_trial(problem: Problem, trial: Trial, abandoned: Callable[[], bool] = lambda: False) -> SimulatedTrial | str:
    """Call `simulate_trial`; return the error message if it raises UserError."""
    try:
        return simulate_trial(problem, trial, abandoned)
    except UserError as error:
        return str(error)


def simulate_trial(problem: Problem, trial: Trial, abandoned: Callable[[], bool] = lambda: False) -> SimulatedTrial:
    """Simulate a design and check the SLO. Raises UserError for invalid inputs or a cancelled plan.

    The simulation polls the callback `abandoned`, which returns True if the plan is cancelled.
    """
    began = time.process_time()
    slo = problem.slo_of(trial.design)
    requests = _requests(problem.workload.drawn(trial.draw), trial.rate)
    if trial.design.family.judged is Phase.PREFILL:
        requests = tuple(replace(request, output_tokens=1) for request in requests)  # prefill without decode
    hopeless = SloUnreachable(requests, slo, problem.attainment)
    stopped = False

    def stop_when(statistics: RunStatistics) -> bool:
        nonlocal stopped
        if abandoned():
            raise UserError("the plan was cancelled")
        stopped = hopeless(statistics)
        return stopped

    result = simulate(
        problem.spec(trial.design),
        requests,
        catalog=problem.catalog,
        slo=slo if isinstance(slo, Slo) else None,
        reference=problem.reference_model(),
        stop_when=stop_when,
        series=False,
    )
    judged = verdict(result, slo, problem.attainment)
    evaluation = Evaluation(
        met=judged.met and not stopped,
        checks=(*judged.checks, *_ceilings(result, slo, problem.attainment)),
        bound_by=bound_by(result, slo),
        stopped=stopped,
        requests=result.arrived,
        output_tokens=result.output_tokens,
        duration_s=result.duration_s,
        energy_j=result.energy_j,
        ttft_s=_latency(result.ttft_s),
        tpot_s=_latency(result.tpot_s),
        e2e_s=_latency(result.e2e_s),
        longest_prompt=result.longest_prompt,
        slo_scale=None if stopped else result.tightest_scale(problem.attainment),
        pools=result.pools,
    )
    return SimulatedTrial(evaluation=evaluation, cpu_s=time.process_time() - began)


def _ceilings(result: SimulationResult, slo: Slo | SlowdownSlo, attainment: float) -> Iterator[Check]:
    """Yield a check for each latency bound of an SLO: for an attainment of 0.9, the P90 must not exceed the bound."""
    percentile = 100 * attainment
    if not isinstance(slo, Slo):
        return
    for name, histogram, bound_s in (
        ("TTFT", result.ttft_s, slo.ttft_s),
        ("TPOT", result.tpot_s, slo.tpot_s),
        ("E2E", result.e2e_s, slo.e2e_s),
    ):
        if bound_s is not None:
            value = histogram.percentile(percentile)
            met = value is None or value <= bound_s
            yield Check(name=f"{name} P{percentile:g}", value=value, bound=bound_s, met=met)


def bound_by(result: SimulationResult, slo: Slo | SlowdownSlo) -> Phase | None:
    """Return the phase closer to missing its SLO bound; None if both are equally close."""
    if isinstance(slo, Slo):
        prefill, decode = _misses(result.ttft_s, slo.ttft_s), _misses(result.tpot_s, slo.tpot_s)
    else:
        prefill, decode = _excess(result.ttft_slowdown, slo.ttft), _excess(result.tpot_slowdown, slo.tpot)
    if prefill == decode:  # the busier phase decides
        busy = {pool.role: pool.utilization for pool in result.pools}
        prefill, decode = busy.get(Phase.PREFILL.value, 0.0), busy.get(Phase.DECODE.value, 0.0)
    if prefill == decode:
        return None
    return Phase.PREFILL if prefill > decode else Phase.DECODE


def _misses(histogram: Histogram, bound_s: float | None) -> float:
    within = None if bound_s is None else histogram.fraction_at_most(bound_s)
    return 0.0 if within is None else 1.0 - within


def _excess(histogram: Histogram | None, bounds: dict[int, float]) -> float:
    if histogram is None:
        return 0.0
    values = ((histogram.percentile(percentile), bound) for percentile, bound in bounds.items())
    return max((value / bound for value, bound in values if value is not None), default=0.0)


def _latency(histogram: Histogram) -> LatencyPercentiles | None:
    p50, p90, p99 = (histogram.percentile(p) for p in (50, 90, 99))
    return None if p50 is None or p90 is None or p99 is None else LatencyPercentiles(p50=p50, p90=p90, p99=p99)


@lru_cache(maxsize=4)
def _requests(workload: WorkloadArguments, rate: float) -> tuple[Request, ...]:
    return tuple(workload.requests(rate))
