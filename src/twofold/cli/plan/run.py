"""Implementation of `twofold plan`: search for a plan, print it and write files."""

import asyncio

import typer
from rich.console import Console

from twofold.atomic_file import AtomicFile
from twofold.cli.options import check_outputs
from twofold.cli.plan.capacity import run_capacity
from twofold.cli.plan.placement import run_placement
from twofold.cli.plan.query import read_problem, read_query, with_profile_machines, with_ray_machines
from twofold.cli.plan.search import OpenSearch, open_search
from twofold.cli.plan.settings import PlanSettings
from twofold.cli.settings import refuse
from twofold.errors import ConfigurationError
from twofold.planning.advice import advise
from twofold.planning.deployment import deployment_of, deployment_text
from twofold.planning.design import RatedDesign
from twofold.planning.pareto import RateCurve, front_of, rate_curve
from twofold.planning.plan import Plan, PlanQuery, make_plan
from twofold.planning.problem import Problem
from twofold.planning.rates import RateGrid
from twofold.planning.search import Objective
from twofold.reporting.outcome import PlanResult
from twofold.reporting.plan.html import pareto_chart, plan_page
from twofold.reporting.plan.report import PlanReport
from twofold.reporting.plan.table import plan_tables


def run(settings: PlanSettings) -> None:
    """Make the plan, and print tables or JSON. Raises ConfigurationError for invalid flags."""
    made = planned(settings)
    if settings.json:
        typer.echo(made.report.json())
    else:
        Console().print(made.tables)


def planned(settings: PlanSettings) -> PlanResult:
    """Make the kind of plan that the flags select, and write the files. Raises ConfigurationError for invalid flags."""
    settings = with_profile_machines(settings)
    problem = read_problem(settings)
    if settings.kv_capacity or settings.goodput:
        refuse(settings, "kv_cache", "does not work with --kv-capacity and --objective goodput")
    if settings.kv_capacity:
        return run_capacity(problem, settings)
    refuse(settings, "nodes dram_gb dram_price disk_price", "needs --kv-capacity")
    if settings.ray is not None and settings.jobs is not None:
        raise ConfigurationError("--jobs counts cores of this machine: leave it out with --ray")
    written = {name: path for name in ("output", "html") if (path := getattr(settings, name)) is not None}
    check_outputs(written, [settings.store, settings.workload, *settings.profiles, *settings.catalog])
    settings = with_ray_machines(problem, settings)
    return run_placement(problem, settings) if settings.goodput else run_plan(problem, settings)


def run_plan(problem: Problem, settings: PlanSettings) -> PlanResult:
    """Find the best machines, and write the output files."""
    query = read_query(problem, settings)
    page = None if settings.html is None else AtomicFile(settings.html)
    deployment = None if settings.output is None else AtomicFile(settings.output)
    with open_search(problem, query.objective, RateGrid(settings.tolerance), settings) as search:
        plan, front, curves = asyncio.run(_search(search, query, with_curves=page is not None))
    advice, effort, title = advise(plan, settings.tolerance), search.evaluator.effort, _title(problem, query)
    if deployment is not None:
        comment = f"{title}: {plan.best.design.name}, planned by simulation.\n{advice.text}"
        deployment.save(deployment_text(deployment_of(problem, plan.best, query.objective), comment))
    if page is not None:
        page.save(plan_page(plan, advice, front, curves, slo=problem.slo, title=title))
    return PlanResult(
        verdict=advice.text,
        report=PlanReport.of(problem, plan, advice, front, effort),
        choices=plan.choices,
        charts=[pareto_chart(plan, front)],
        tables=plan_tables(plan, advice, front, effort, title),
    )


async def _search(
    search: OpenSearch, query: PlanQuery, *, with_curves: bool
) -> tuple[Plan, tuple[RatedDesign, ...], dict[str, RateCurve]]:
    """Return a plan, its Pareto front, and latencies by request rate."""
    plan = await make_plan(search.rates, query, search.progress.found)
    # The break-even search also simulates designs outside the budget.
    points = [
        RatedDesign(design=trial.design, rate=trial.rate)
        for trial, evaluation in search.evaluator.answered().items()
        if evaluation.met and trial.draw == 0 and query.budget.allows(trial.design)
    ]
    front = await front_of(search.rates, plan.choices, points)
    shown = plan.best_of_both if with_curves else ()
    return plan, front, {choice.design.name: await rate_curve(search.rates, choice) for choice in shown}


def _title(problem: Problem, query: PlanQuery) -> str:
    what = {
        Objective.THROUGHPUT: "Most requests per second",
        Objective.COST: "Least dollars",
        Objective.POWER: "Least power",
    }[query.objective]
    at = "" if query.rate is None else f" at {query.rate:g} requests/s"
    return f"{what} for {problem.template.model}{at}, {problem.workload.description}"
