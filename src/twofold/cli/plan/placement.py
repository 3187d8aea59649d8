"""`twofold plan --objective goodput`: find a placement as DistServe does, with separate parallelism per phase."""

import asyncio
from typing import Final

from twofold.atomic_file import AtomicFile
from twofold.cli.plan.query import counts_of, read_draws
from twofold.cli.plan.search import open_search
from twofold.cli.plan.settings import PlanSettings, RunSettings
from twofold.errors import ConfigurationError, require
from twofold.planning.deployment import deployment_of, deployment_text
from twofold.planning.evaluator import Effort
from twofold.planning.placement.instances import Affinity
from twofold.planning.placement.plan import PlacementPlan, PlacementQuery, PreparedPlacement, make_placement, prepare
from twofold.planning.problem import Problem
from twofold.planning.rates import RateGrid
from twofold.planning.search import Objective
from twofold.reporting.outcome import PlanResult
from twofold.reporting.plan.html import placement_charts, placement_page
from twofold.reporting.plan.placement import PlacementReport, placement_tables, verdict_text

_MIN_GPUS: Final = 2
_MAX_GPUS: Final = 4096  # more is a typing error, or a search of hours


def run_placement(problem: Problem, settings: PlanSettings) -> PlanResult:
    """Find the best placement, and write the output files."""
    prepared = prepare(problem, read_placement_query(problem, settings))
    deployment, page = (None if path is None else AtomicFile(path) for path in (settings.output, settings.html))
    plan, effort = search_placement(prepared, RateGrid(settings.tolerance), settings)
    title, best, verdict = _title(prepared), plan.recommended, verdict_text(plan)
    if deployment is not None:
        comment = f"{title}: {best.design.name}, planned by simulation.\n{verdict}"
        deployment.save(deployment_text(deployment_of(problem, best, Objective.GOODPUT), comment))
    if page is not None:
        page.save(placement_page(plan, title))
    found = (*plan.placement.split, *plan.placement.colocated)
    return PlanResult(
        verdict=verdict,
        report=PlacementReport.of(plan, effort),
        choices=(best, *(each for each in found if each.design != best.design)),
        charts=placement_charts(plan),
        tables=placement_tables(plan, effort, title),
    )


def search_placement(
    prepared: PreparedPlacement, grid: RateGrid, settings: RunSettings
) -> tuple[PlacementPlan, Effort]:
    """Return the best placement, and the number of simulations and CPU seconds of the search."""
    with open_search(prepared.problem, Objective.GOODPUT, grid, settings) as search:
        return asyncio.run(make_placement(search.rates, prepared)), search.evaluator.effort


def read_placement_query(problem: Problem, settings: PlanSettings) -> PlacementQuery:
    """Convert the flags to inputs of a placement search. Raises ConfigurationError for invalid flags."""
    return PlacementQuery(
        stock=_read_stock(problem, settings.machines, settings.max_gpus),
        rate=settings.rate,
        affinity=None if settings.affinity == "auto" else Affinity(settings.affinity),
        most_stages=settings.max_pipeline,
        draws=read_draws(problem, settings),
    )


def _read_stock(problem: Problem, machines: str | None, max_gpus: str | None) -> dict[str, int]:
    if max_gpus is None:
        raise ConfigurationError(
            "--objective goodput needs --max-gpus: the number of accelerators, as in 8 or a100=8,h100=16"
        )
    stock: dict[str, int] = {}
    for word, name, count in counts_of(max_gpus, "--max-gpus", f"give 1 to {_MAX_GPUS}, or a100=8,h100=16"):
        kind = only_machine(problem, machines, "--max-gpus N") if name is None else problem.kind(name).name
        require(kind not in stock, f"--max-gpus gives {kind} twice")
        require(1 <= count <= _MAX_GPUS, f"--max-gpus {word!r} is out of range: give 1 to {_MAX_GPUS}")
        stock[kind] = count
    require(sum(stock.values()) >= _MIN_GPUS, f"--max-gpus {max_gpus} is too few: two phases need {_MIN_GPUS} at least")
    return stock


def only_machine(problem: Problem, machines: str | None, flag: str) -> str:
    """Return the machine type of --machines. Raises ConfigurationError unless --machines names exactly one."""
    names = [name.strip() for name in (machines or "").split(",") if name.strip()]
    require(len(names) == 1, f"{flag} needs one kind of machine in --machines, as in --machines a100")
    return problem.kind(names[0]).name


def _title(prepared: PreparedPlacement) -> str:
    model, workload = prepared.problem.template.model, prepared.problem.workload.workload
    rate = prepared.query.rate
    if rate is None:
        return f"Most goodput of {model}, {workload}, on {prepared.query.accelerators} accelerators"
    return f"Fewest accelerators for {model}, {workload}, at {rate:g} requests/s"
