"""What a design takes, under the published timing and under the corrected one: the planner's search, in a form for tables."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from designs import Kind, family, within
from msgspec.structs import replace

from twofold.hardware.catalog import Catalog, load_catalog
from twofold.instance import Role
from twofold.planning.bounds import Bounds
from twofold.planning.budget import Allows, frontier
from twofold.planning.design import Design
from twofold.planning.evaluation import Evaluation
from twofold.planning.evaluator import Evaluator
from twofold.planning.executors.local import LocalExecutor
from twofold.planning.key import Keys
from twofold.planning.problem import Problem
from twofold.planning.rates import RateGrid, RateSearch
from twofold.planning.store import NoStore, SqliteStore, Store
from twofold.planning.throughput import most_throughput
from twofold.planning.workload import WorkloadArguments
from twofold.simulation.presets import splitwise_sim
from twofold.simulation.spec import ClusterSpec, PoolSpec
from twofold.slo import SPLITWISE


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """A way to time and to run clusters; `mixed_batchers` are the ways in which a baseline may batch."""

    name: str
    template: ClusterSpec
    mixed_batchers: tuple[str, ...]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How much to simulate, and where."""

    minutes: float = 2.0
    jobs: int = 1
    model: str = "bloom-176b"
    tolerance: float = 0.02
    store: Path | None = None
    traces: Path | None = None

    def workload(self, name: str) -> WorkloadArguments:
        """`conv` or `code`: the lengths of the Azure traces of 2023 and Poisson arrivals, as in the paper."""
        if self.traces is None:
            return WorkloadArguments(workload=f"azure-{name}", duration_s=60 * self.minutes)
        path = self.traces / f"azure-2023-{name}.csv"
        return WorkloadArguments(workload=str(path), duration_s=60 * self.minutes, arrival="poisson")


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A design with the most requests per second at which it keeps the nine SLOs (0 where it never does)."""

    design: Design
    rate: float
    evaluation: Evaluation | None


def timings(settings: Settings, catalog: Catalog) -> dict[str, Timing]:
    """`published`: SplitwiseSim's timing and rules. `corrected`: fitted times and Twofold's own rules."""
    split = (PoolSpec(machines=1, machine="dgx-h100", role=Role.PREFILL),)
    published = replace(splitwise_sim(split, settings.model, catalog=catalog), pools=())
    return {
        "published": Timing(name="published", template=published, mixed_batchers=("splitwise-sim",)),
        "corrected": Timing(
            name="corrected",
            template=ClusterSpec(pools=(), model=settings.model),
            mixed_batchers=("mixed", "chunked-prefill"),
        ),
    }


class Study:
    """Searches for one timing and one workload; what was simulated once is not simulated again."""

    def __init__(
        self, timing: Timing, problem: Problem, search: RateSearch, evaluator: Evaluator
    ) -> None:
        self.timing, self.problem, self.search, self.evaluator = timing, problem, search, evaluator

    def design(self, kind: Kind, counts: Sequence[int], batcher: str | None = None) -> Design:
        made = family(kind, self.problem.catalog, batcher or self.timing.mixed_batchers[0])
        return Design(family=made, counts=tuple(counts))

    async def capacity(self, kind: Kind, counts: Sequence[int]) -> Found:
        """Of a given number of machines; of a baseline, with the way to batch that takes most."""
        batchers = (None,) if kind.split else self.timing.mixed_batchers
        return max(
            [await self._capacity(self.design(kind, counts, batcher)) for batcher in batchers],
            key=lambda found: found.rate,
        )

    async def tuned(self, kind: Kind, equal: str) -> Found:
        """Of the best split that is no more power, or cost, than 40 DGX-H100."""
        return await self.best(kind, within(equal, self.problem.catalog))

    async def best(self, kind: Kind, allows: Allows) -> Found:
        """Of the best split that is allowed."""
        found = []
        for batcher in (None,) if kind.split else self.timing.mixed_batchers:
            made = family(kind, self.problem.catalog, batcher or self.timing.mixed_batchers[0])
            capacity = await most_throughput(self.search, frontier(made, allows))
            rate = 0.0 if capacity.step is None else self.search.grid.rate(capacity.step)
            found.append(Found(design=capacity.design, rate=rate, evaluation=capacity.kept or capacity.missed))
        return max(found, key=lambda each: each.rate)

    async def _capacity(self, design: Design) -> Found:
        capacity = await self.search.highest(design)
        rate = 0.0 if capacity.step is None else self.search.grid.rate(capacity.step)
        return Found(design=design, rate=rate, evaluation=capacity.kept or capacity.missed)


@contextmanager
def study(timing: Timing, workload: str, settings: Settings, catalog: Catalog) -> Iterator[Study]:
    """Workers that simulate live as long as the context."""
    problem = Problem(
        template=timing.template,
        workload=settings.workload(workload),
        slo=SPLITWISE,
        catalog=catalog,
    )
    with _store(settings) as store, LocalExecutor(problem, settings.jobs) as executor:
        evaluator = Evaluator(executor, store, Keys(problem).of)
        search = RateSearch(evaluate=evaluator, bound=Bounds(problem), grid=RateGrid(settings.tolerance))
        yield Study(timing, problem, search, evaluator)


@contextmanager
def _store(settings: Settings) -> Iterator[Store]:
    if settings.store is None:
        yield NoStore()
    else:
        with SqliteStore(settings.store) as store:
            yield store


if __name__ == "__main__":
    import sys
    import time

    from designs import AA, BASELINE_A100, BASELINE_H100, HA, HH, HHCAP, paper_set

    catalog = load_catalog()
    settings = Settings(jobs=1, minutes=float(sys.argv[1]))
    for name, timing in timings(settings, catalog).items():
        for wl in ("conv", "code"):
            with study(timing, wl, settings, catalog) as st:

                async def go():
                    for kind in (BASELINE_H100, BASELINE_A100, AA, HH, HA, HHCAP):
                        t = time.time()
                        c = await st.capacity(kind, paper_set("iso-power", wl).counts[kind.name])
                        print(name, wl, kind.name, c.design.name, c.rate, c.evaluation.bound_by, f"{time.time()-t:.1f}s", flush=True)

                asyncio.run(go())
