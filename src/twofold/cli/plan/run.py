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
from twofold.planning.pareto import front_of, rate_curve
from twofold.planning.plan import PlanQuery, make_plan
from twofold.planning.problem import Problem
from twofold.planning.rates import RateGrid
from twofold.planning.search import Objective
from twofold.reporting.plan.html import pareto_chart, plan_page, rates_chart
from twofold.reporting.plan.outcome import PlanResult
from twofold.reporting.plan.report import PlanReport
from twofold.reporting.plan.table import plan_tables


def run(settings: PlanSettings) -> None:
    """Make the plan, write the output files, and print tables or JSON. Raises ConfigurationError for invalid flags."""
    deployment, page = (None if path is None else AtomicFile(path) for path in (settings.output, settings.html))
    made = planned(settings)
    if deployment is not None:
        deployment.save(made.to_yaml())
    if page is not None:
        page.save(made.to_html())
    if settings.json:
        typer.echo(made.report.json())
    else:
        Console().print(made.tables)


def planned(settings: PlanSettings) -> PlanResult:
    """Run the kind of planning that the flags select. Raises ConfigurationError for invalid flags."""
    settings = with_profile_machines(settings)
    problem = read_problem(settings)
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
    """Find the best machines."""
    query = read_query(problem, settings)
    with open_search(problem, query.objective, RateGrid(settings.tolerance), settings) as search:
        return asyncio.run(_search(search, problem, query, with_curves=settings.html is not None))


async def _search(search: OpenSearch, problem: Problem, query: PlanQuery, *, with_curves: bool) -> PlanResult:
    plan = await make_plan(search.rates, query, search.progress.found)
    # The break-even search also simulates designs outside the budget.
    points = [
        RatedDesign(design=trial.design, rate=trial.rate)
        for trial, evaluation in search.evaluator.answered().items()
        if evaluation.met and trial.draw == 0 and query.budget.allows(trial.design)
    ]
    front = await front_of(search.rates, plan.choices, points)
    shown = plan.best_of_both if with_curves else ()
    curves = {choice.design.name: await rate_curve(search.rates, choice) for choice in shown}
    advice, effort, title = advise(plan, search.rates.grid.tolerance), search.evaluator.effort, _title(problem, query)
    charts = (pareto_chart(plan, front), *([rates_chart(curves, problem.slo)] if curves else []))
    comment = f"{title}: {plan.best.design.name}, planned by simulation.\n{advice.text}"
    return PlanResult(
        title=title,
        verdict=advice.text,
        report=PlanReport.of(problem, plan, advice, front, effort),
        choices=plan.choices,
        charts=charts,
        tables=plan_tables(plan, advice, front, effort, title),
        page=lambda: plan_page(plan, advice, charts, slo=problem.slo, title=title),
        deployment=lambda: deployment_text(deployment_of(problem, plan.best, query.objective), comment),
    )


def _title(problem: Problem, query: PlanQuery) -> str:
    what = {
        Objective.THROUGHPUT: "Most requests per second",
        Objective.COST: "Least dollars",
        Objective.POWER: "Least power",
    }[query.objective]
    at = "" if query.rate is None else f" at {query.rate:g} requests/s"
    return f"{what} for {problem.template.model}{at}, {problem.workload.description}"
