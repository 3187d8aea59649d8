"""The steps of `twofold plan`: search, judge, show and write what was asked for."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from twofold.cli.plan_progress import plan_progress
from twofold.errors import ConfigurationError
from twofold.planning.advice import Advice, advise
from twofold.planning.bounds import AnalyticBounds
from twofold.planning.deployment import deployment_of, deployment_text
from twofold.planning.evaluator import Effort, Evaluator, Executor, Keys, SqliteStore
from twofold.planning.executors.local import LocalExecutor, cores
from twofold.planning.executors.ray import RayExecutor
from twofold.planning.pareto import ParetoPoint, RateCurve, front_of, rate_curve
from twofold.planning.plan import DesignChoice, Plan, PlanQuery, make_plan
from twofold.planning.problem import Problem
from twofold.planning.rates import RateGrid, RateSearch
from twofold.planning.search import Objective
from twofold.reporting.plan.html import plan_page
from twofold.reporting.plan.report import PlanReport
from twofold.reporting.plan.table import plan_tables
from twofold.simulation.observers.files import AtomicFile


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Where simulations run and where their results are kept."""

    store: Path
    jobs: int | None = None
    ray: str | None = None

    def executor(self, problem: Problem) -> Executor:
        """The Ray cluster if one was named, else this machine's cores."""
        if self.ray is not None:
            return RayExecutor(problem, self.ray)
        return LocalExecutor(problem, self.jobs or cores())


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """What to write besides the tables."""

    output: Path | None = None
    html: Path | None = None

    def require_apart(self, others: Iterable[str | Path]) -> None:
        """Raise ConfigurationError where both are one file, or one that is read or kept."""
        if self.output is not None and self.html is not None and self.output.resolve() == self.html.resolve():
            raise ConfigurationError(f"--output and --html both ask for {self.html}: name two files")
        taken = {Path(other).resolve() for other in others}
        for flag, path in (("--output", self.output), ("--html", self.html)):
            if path is not None and path.resolve() in taken:
                raise ConfigurationError(f"{flag} {path} is a file that the plan reads: name another")


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with all that is said of it."""

    plan: Plan
    advice: Advice
    front: tuple[ParetoPoint, ...]
    curves: dict[str, RateCurve]
    effort: Effort


def run(
    problem: Problem,
    question: PlanQuery,
    *,
    tolerance: float,
    where: Where,
    files: Files,
    as_json: bool,
    inputs: Sequence[Path] = (),
) -> None:
    """Plan, write the files, and print the tables or the JSON."""
    if where.ray is not None and where.jobs is not None:
        raise ConfigurationError("--jobs counts the cores of this machine: leave it out with --ray")
    files.require_apart((where.store, problem.workload.workload, *inputs))
    page = None if files.html is None else AtomicFile(files.html)
    deployment = None if files.output is None else AtomicFile(files.output)
    made = _searched(problem, question, RateGrid(tolerance), where, with_curves=page is not None)
    title = _title(problem, question)
    if deployment is not None:
        deployment.write(_deployment(problem, made, title).encode())
        deployment.commit()
    if page is not None:
        page.write(_page(problem, made, title).encode())
        page.commit()
    if as_json:
        typer.echo(PlanReport.of(problem, made.plan, made.advice, made.front, made.effort).json())
    else:
        Console().print(plan_tables(made.plan, made.advice, made.front, made.effort, title))


def _searched(
    problem: Problem, question: PlanQuery, grid: RateGrid, where: Where, *, with_curves: bool
) -> Made:
    bounds, key = (
        AnalyticBounds(problem),
        Keys(problem).of,
    )  # both look at the workload: mistakes in it are found here
    with (
        SqliteStore(where.store) as store,
        plan_progress(question.objective) as shown,
        where.executor(problem) as executor,
    ):
        evaluator = Evaluator(executor, store, key, shown.evaluated)
        search = RateSearch(evaluate=evaluator, bound=bounds, grid=grid)
        return asyncio.run(_made(search, question, shown.found, evaluator, with_curves=with_curves))


async def _made(
    search: RateSearch,
    question: PlanQuery,
    found: Callable[[DesignChoice], None],
    evaluator: Evaluator,
    *,
    with_curves: bool,
) -> Made:
    plan = await make_plan(search, question, found)
    kept = (trial for trial, told in evaluator.answered().items() if told.met)
    found_points = [ParetoPoint(design=trial.design, rate=trial.rate) for trial in kept]
    front = await front_of(search, plan.choices, found_points)
    best = [choice for choice in (plan.best_split, plan.best_colocated) if choice is not None]
    curves = {choice.design.name: await rate_curve(search, choice) for choice in best} if with_curves else {}
    return Made(
        plan=plan,
        advice=advise(plan, search.grid.tolerance),
        front=front,
        curves=curves,
        effort=evaluator.effort,
    )


def _title(problem: Problem, question: PlanQuery) -> str:
    what = {
        Objective.THROUGHPUT: "most requests per second",
        Objective.COST: "least dollars",
        Objective.POWER: "least power",
    }[question.objective]
    at = "" if question.rate is None else f" at {question.rate:g} requests/s"
    return f"{what[:1].upper()}{what[1:]} for {problem.template.model}, {problem.workload.workload}{at}"


def _page(problem: Problem, made: Made, title: str) -> str:
    return plan_page(made.plan, made.advice, made.front, made.curves, slo=problem.slo, title=title)


def _deployment(problem: Problem, made: Made, title: str) -> str:
    best = made.plan.best
    comment = f"{title}: {best.design.name}, planned by simulation.\n{made.advice.text}"
    return deployment_text(deployment_of(problem, best, made.plan.query.objective), comment)
