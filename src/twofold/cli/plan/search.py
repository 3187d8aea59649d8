"""Open the search of a plan: its executor, the store of finished simulations, and progress on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from twofold.cli.progress import PlanProgress, plan_progress
from twofold.planning.bounds import AnalyticBounds
from twofold.planning.evaluator import EvaluationStore, Evaluator, Executor, Keys
from twofold.planning.executors.local import LocalExecutor, cores
from twofold.planning.executors.ray import RayExecutor
from twofold.planning.problem import Problem
from twofold.planning.rates import RateGrid, RateSearch
from twofold.planning.search import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEnvironment:
    """The executor of simulations and the store of their results."""

    store: Path
    jobs: int | None = None
    ray: str | None = None

    def executor(self, problem: Problem) -> Executor:
        """Return an executor on the Ray cluster if one is named, else on the cores of this machine."""
        if self.ray is not None:
            return RayExecutor(problem, self.ray)
        return LocalExecutor(problem, self.jobs or cores())


@dataclass(frozen=True, slots=True)
class OpenSearch:
    """An open search: rate search, evaluator and progress display."""

    rates: RateSearch
    evaluator: Evaluator
    progress: PlanProgress


@contextmanager
def open_search(
    problem: Problem, objective: Objective, grid: RateGrid, environment: PlanEnvironment
) -> Iterator[OpenSearch]:
    """Open store and executor for a search; raises ConfigurationError for an invalid workload."""
    bounds, keys = AnalyticBounds(problem), Keys(problem)  # both read the workload
    with (
        EvaluationStore(environment.store) as store,
        plan_progress(objective) as progress,
        environment.executor(problem) as executor,
    ):
        evaluator = Evaluator(executor, store, keys.of, progress.evaluated)
        yield OpenSearch(RateSearch(evaluate=evaluator, bound=bounds, grid=grid), evaluator, progress)
