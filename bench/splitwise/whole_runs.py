"""Parallel simulations to measure throughput and latency at given request rates."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec

from twofold.planning.design import Design
from twofold.planning.problem import Problem
from twofold.simulation.observers.base import Observer
from twofold.simulation.result import SimulationResult
from twofold.simulation.simulate import simulate
from twofold.timeline import Moment, Timeline


class Job(msgspec.Struct, frozen=True):
    """One simulation: a cluster design at `rate` requests per second."""

    problem: Problem
    design: Design
    rate: float


class CompleteRun(msgspec.Struct, frozen=True):
    """Simulation result, and throughput over the middle half of the run."""

    result: SimulationResult
    tokens_per_s: float
    requests_per_s: float


class _Ends(Observer):
    """Observer that collects the end time and the output length of each request."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, int]] = []

    def ended(self, timeline: Timeline, now: float) -> None:
        if Moment.LAST_TOKEN in timeline.moments:
            self.ends.append((timeline.moments[Moment.LAST_TOKEN], timeline.output_tokens))


def run_all(jobs: Sequence[Job], processes: int) -> list[CompleteRun]:
    """Run the simulations in parallel. Results have the order of `jobs`."""
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
        return list(pool.map(run, jobs))


def run(job: Job) -> CompleteRun:
    ends = _Ends()
    problem = job.problem
    result = simulate(
        problem.spec(job.design),
        problem.workload.requests(job.rate),
        catalog=problem.catalog,
        reference=problem.reference_model(),
        observers=[ends],
        series=False,
    )
    tokens, requests = _in_the_middle(ends.ends)
    return CompleteRun(result, tokens, requests)


def _in_the_middle(ends: Sequence[tuple[float, int]]) -> tuple[float, float]:
    first, last = len(ends) // 4, 3 * len(ends) // 4
    seconds = ends[last - 1][0] - ends[first - 1][0] if first else 0.0
    if seconds <= 0:
        return 0.0, 0.0
    return sum(tokens for _, tokens in ends[first:last]) / seconds, (last - first) / seconds
