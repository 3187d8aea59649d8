"""The steps of `twofold plan --objective goodput`: search, show and write what was asked for."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from twofold.cli.plan_progress import plan_progress
from twofold.cli.plan_run import Files, Where
from twofold.errors import ConfigurationError
from twofold.planning.bounds import AnalyticBounds
from twofold.planning.deployment import deployment_of, deployment_text
from twofold.planning.evaluator import Effort, Evaluator, Keys, SqliteStore
from twofold.planning.placement.instances import Affinity
from twofold.planning.placement.plan import (
    PlacementPlan,
    PlacementQuery,
    PreparedPlacement,
    make_placement,
    prepare,
)
from twofold.planning.plan import DesignChoice
from twofold.planning.problem import Problem
from twofold.planning.rates import RateGrid, RateSearch
from twofold.planning.search import Objective
from twofold.reporting.plan.placement import PlacementReport, placement_tables, verdict_text
from twofold.simulation.observers.files import AtomicFile

_LEAST, _MOST = 2, 4096  # more is a slip of the keyboard, or a search that takes hours


def read_question(
    problem: Problem,
    machines: str | None,
    *,
    max_gpus: str | None,
    max_pipeline: int | None,
    rate: float | None,
    affinity: str,
) -> PlacementQuery:
    """Raises ConfigurationError for flags that make no question."""
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigurationError(f"--rate {rate:g} cannot be: give more than 0 requests per second")
    try:
        wanted = None if affinity == "auto" else Affinity(affinity)
    except ValueError:
        raise ConfigurationError(f"--affinity {affinity!r} is not one of auto, high, low") from None
    return PlacementQuery(
        stock=_read_stock(problem, machines, max_gpus), rate=rate, affinity=wanted, most_stages=max_pipeline
    )


def _read_stock(problem: Problem, machines: str | None, max_gpus: str | None) -> dict[str, int]:
    """`8` of the one kind that --machines names, or `a100=8,h100=16`."""
    if max_gpus is None:
        raise ConfigurationError(
            "--objective goodput needs --max-gpus: how many accelerators there are, as in 8 or a100=8,h100=16"
        )
    stock: dict[str, int] = {}
    for word in max_gpus.split(","):
        name, equals, number = word.rpartition("=")
        kind = problem.kind(name.strip()).name if equals else _only_machine(problem, machines)
        if kind in stock:
            raise ConfigurationError(f"--max-gpus says twice how many there are of {kind}")
        stock[kind] = _count(number, word)
    if sum(stock.values()) < _LEAST:
        raise ConfigurationError(f"--max-gpus {max_gpus} cannot be: two phases need {_LEAST} at least")
    return stock


def _only_machine(problem: Problem, machines: str | None) -> str:
    names = [name.strip() for name in (machines or "").split(",") if name.strip()]
    if len(names) != 1:
        raise ConfigurationError(
            "--max-gpus counts accelerators of what? Say --machines a100, or a100=8,h100=16"
        )
    return problem.kind(names[0]).name


def _count(number: str, word: str) -> int:
    try:
        count = int(number)
    except ValueError:
        count = 0
    if not 1 <= count <= _MOST:
        raise ConfigurationError(
            f"--max-gpus {word!r} is not understood: give 1 to {_MOST}, or a100=8,h100=16"
        )
    return count


def run(
    problem: Problem,
    question: PlacementQuery,
    *,
    tolerance: float,
    where: Where,
    files: Files,
    as_json: bool,
    inputs: Sequence[Path] = (),
) -> None:
    """Search, write the deployment, and print the tables or the JSON."""
    if files.html is not None:
        raise ConfigurationError(
            "--html draws plans of whole machines: leave it out with --objective goodput"
        )
    files.require_apart((where.store, problem.workload.workload, *inputs))
    prepared = prepare(problem, question)
    deployment = None if files.output is None else AtomicFile(files.output)
    plan, effort = search_placement(prepared, RateGrid(tolerance), where)
    if deployment is not None:
        deployment.write(_deployment(plan).encode())
        deployment.commit()
    if as_json:
        typer.echo(PlacementReport.of(plan, effort).json())
    else:
        Console().print(placement_tables(plan, effort, _title(prepared)))


def search_placement(
    prepared: PreparedPlacement, grid: RateGrid, where: Where
) -> tuple[PlacementPlan, Effort]:
    """The answer, and the simulations that it took."""
    problem = prepared.problem
    bounds, key = AnalyticBounds(problem), Keys(problem).of
    with (
        SqliteStore(where.store) as store,
        plan_progress(Objective.GOODPUT) as shown,
        where.executor(problem) as executor,
    ):
        evaluator = Evaluator(executor, store, key, shown.evaluated)
        search = RateSearch(evaluate=evaluator, bound=bounds, grid=grid)
        return asyncio.run(make_placement(search, prepared)), evaluator.effort


def _title(prepared: PreparedPlacement) -> str:
    template, workload = prepared.problem.template, prepared.problem.workload.workload
    rate = prepared.query.rate
    if rate is None:
        return f"Most goodput of {template.model}, {workload}, on {prepared.query.accelerators} accelerators"
    return f"Fewest accelerators for {template.model}, {workload}, at {rate:g} requests/s"


def _deployment(plan: PlacementPlan) -> str:
    best, problem = plan.best, plan.prepared.problem
    choice = DesignChoice(
        design=best.design, rate=best.rate, highest_rate=best.rate, evaluation=best.evaluation
    )
    comment = f"{_title(plan.prepared)}: {best.design.name}, planned by simulation.\n{verdict_text(plan)}"
    return deployment_text(deployment_of(problem, choice, Objective.GOODPUT), comment)
