"""Search for the cluster designs with the highest request rates within the SLOs.

The searches use the performance models of SplitwiseSim and of Twofold.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from designs import A100, CAPPED, H100, Kind, families, machine_kind, within
from msgspec.structs import replace
from presets import splitwise_sim

from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.planning.bounds import AnalyticBounds
from twofold.planning.design import Allows, Design, Family, frontier
from twofold.planning.evaluator import EvaluationStore, Evaluator, Executor, Keys
from twofold.planning.executors.local import LocalExecutor
from twofold.planning.problem import COLOCATED, Problem
from twofold.planning.rates import MaxRate, RateGrid, RateSearch
from twofold.planning.search import most_throughput
from twofold.planning.workload import WorkloadArguments
from twofold.slo import SPLITWISE


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Named set of simulation settings: SplitwiseSim's settings or Twofold's defaults."""

    name: str
    template: ClusterSpec
    batching: tuple[tuple[str, int | None], ...]  # of the baselines: batchers with token budgets


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a study."""

    minutes: float = 2.0
    jobs: int = 1
    model: str = "bloom-176b"
    tolerance: float = 0.02
    store: Path | None = None
    timings: tuple[str, ...] = ("published", "corrected")
    traces: Path | None = None

    def workload(self, name: str) -> WorkloadArguments:
        """Return the workload `conv` or `code`: lengths of the Azure trace of 2023, and Poisson arrivals."""
        if self.traces is None:
            return WorkloadArguments(workload=f"azure-{name}", duration_s=60 * self.minutes)
        path = self.traces / f"azure-2023-{name}.csv"
        return WorkloadArguments(workload=str(path), duration_s=60 * self.minutes, arrival="poisson")


class BestDesign(msgspec.Struct, frozen=True, kw_only=True):
    """A design and the highest rate at which it meets the nine SLOs (0 if there is no such rate)."""

    design: Design
    rate: float


def timings(settings: Settings, catalog: Catalog) -> dict[str, Timing]:
    """Return sets of simulation settings by name: SplitwiseSim's (`published`) and Twofold's defaults (`corrected`)."""
    split = (PoolSpec(machines=1, machine="dgx-h100", role=Role.PREFILL),)
    published = replace(splitwise_sim(split, settings.model, catalog=catalog), pools=())
    known = {
        "published": Timing(name="published", template=published, batching=(("splitwise-sim", None),)),
        "corrected": Timing(name="corrected", template=ClusterSpec(pools=(), model=settings.model), batching=COLOCATED),
    }
    return {name: known[name] for name in settings.timings}


def problem_of(timing: Timing, workload: str, settings: Settings, catalog: Catalog) -> Problem:
    return Problem(template=timing.template, workload=settings.workload(workload), slo=SPLITWISE, catalog=catalog)


class Study:
    """Search for the best cluster designs with one performance model and one workload."""

    def __init__(self, timing: Timing, problem: Problem, search: RateSearch) -> None:
        self.timing, self.problem, self.search = timing, problem, search

    def design(self, kind: Kind, counts: Sequence[int]) -> Design:
        return Design(family=self._families(kind)[0], counts=tuple(counts))

    async def capacity(self, kind: Kind, counts: Sequence[int]) -> BestDesign:
        """Return the design with the highest request rate within the SLOs, and this rate.

        The candidates are designs of kind `kind` with `counts` machines per pool; the candidates differ only in the
        batching method.
        """
        designs = [Design(family=each, counts=tuple(counts)) for each in self._families(kind)]
        found = await asyncio.gather(*(self.search.highest(design) for design in designs))
        return max(map(self._found, found), key=lambda each: each.rate)

    async def tuned(self, kind: Kind, equal: str) -> BestDesign:
        """Return the design of kind `kind` with the highest request rate within a budget.

        The budget is the power (if `equal` is `iso-power`) or the cost (`iso-cost`) of 40 DGX-H100 machines.
        """
        return await self.best(kind, within(equal, self.problem.catalog))

    async def best(self, kind: Kind, allows: Allows) -> BestDesign:
        """Return the design of kind `kind` with the highest request rate, among designs for which `allows`
        returns True.
        """
        frontiers = [frontier(each, allows) for each in self._families(kind)]
        found = await asyncio.gather(*(most_throughput(self.search, designs) for designs in frontiers))
        return max(map(self._found, found), key=lambda each: each.rate)

    def errors(self) -> list[str]:
        """Return the errors of the performance model relative to measurements, a line per machine type."""
        lines = []
        for machine in (A100, H100, CAPPED):
            model = self.problem.performance(machine_kind(machine, self.problem.catalog))
            error = model.error
            known = [
                f"{phase} {value:.0%}"
                for phase, value in (("prefill", error.prefill), ("decode", error.decode))
                if value is not None
            ]
            off = f"mean error {', '.join(known)}" if known else "errors unknown"
            lines.append(f"{model.name}: {off}{' (estimated)' if error.estimated else ''}; {error.basis}")
        return lines

    def _families(self, kind: Kind) -> list[Family]:
        return families(kind, self.problem.catalog, self.timing.batching)

    def _found(self, capacity: MaxRate) -> BestDesign:
        return BestDesign(design=capacity.design, rate=capacity.rate)


@contextmanager
def study(
    timing: Timing,
    workload: str,
    settings: Settings,
    catalog: Catalog,
    executor: Callable[[Problem], Executor] | None = None,
) -> Iterator[Study]:
    """Yield a search for the best cluster designs. Simulations run in worker processes, or with `executor`."""
    problem = problem_of(timing, workload, settings, catalog)
    path = settings.store or Path(":memory:")
    runner = LocalExecutor(problem, settings.jobs) if executor is None else executor(problem)
    with EvaluationStore(path) as store, runner:
        evaluator = Evaluator(runner, store, Keys(problem).of)
        search = RateSearch(evaluate=evaluator, bound=AnalyticBounds(problem), grid=RateGrid(settings.tolerance))
        yield Study(timing, problem, search)
