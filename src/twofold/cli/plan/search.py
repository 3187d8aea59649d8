"""Set-up of the search for a plan: simulation processes, store of earlier results, and progress display."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from twofold.cli.plan.settings import RunSettings
from twofold.cli.progress import PlanProgress, plan_progress
from twofold.planning.bounds import AnalyticBounds
from twofold.planning.evaluator import EvaluationStore, Evaluator, Executor, Keys
from twofold.planning.executors.local import LocalExecutor, cores
from twofold.planning.executors.ray import RayExecutor
from twofold.planning.problem import Problem
from twofold.planning.rates import RateGrid, RateSearch
from twofold.planning.search import Objective


@dataclass(frozen=True, slots=True)
class OpenSearch:
    """Objects with which a planning run searches rates, runs simulations and shows progress."""

    rates: RateSearch
    evaluator: Evaluator
    progress: PlanProgress


@contextmanager
def open_search(problem: Problem, objective: Objective, grid: RateGrid, settings: RunSettings) -> Iterator[OpenSearch]:
    """Open the result store, and start simulation processes and a progress display. Raises ConfigurationError."""
    bounds, keys = AnalyticBounds(problem), Keys(problem)  # both read the workload
    with (
        EvaluationStore(settings.store) as store,
        plan_progress(objective) as progress,
        _executor(problem, settings) as executor,
    ):
        evaluator = Evaluator(executor, store, keys.of, progress.evaluated)
        search = RateSearch(
            evaluate=evaluator,
            bound=bounds,
            grid=grid,
            colocated_batching=problem.colocated_batching,
            split_batchers=problem.split_batchers,
        )
        yield OpenSearch(search, evaluator, progress)


def _executor(problem: Problem, settings: RunSettings) -> Executor:
    """Return an executor of simulations on the Ray cluster at --ray, or on local cores without --ray."""
    if settings.ray is not None:
        return RayExecutor(problem, settings.ray)
    return LocalExecutor(problem, settings.jobs or cores())
