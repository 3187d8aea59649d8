"""Progress bars on stderr, shown only on a terminal."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from twofold.request import Request

if TYPE_CHECKING:  # each command needs one of them
    from twofold.bench.load import LoadCounts, OnChange
    from twofold.planning.evaluation import Evaluation, Trial
    from twofold.planning.evaluator import Effort
    from twofold.planning.plan import DesignChoice
    from twofold.planning.search import Objective

SimulationTick = Callable[[int, float], None]
TRACE_PATIENCE_S: Final = 1.0
_UPDATE_S: Final = 0.1
_TRACE_STEP: Final = 1024  # requests between two reads of the clock
_LOAD = "{task.fields[sent]}/{task.total} sent, {task.fields[done]} done, {task.fields[failed]} failed"
_SIMULATION = "{task.completed:,.0f} requests, {task.fields[simulated]:,.1f} s simulated"
_SIMULATION_SPEED = "{task.fields[speed]:,.0f}× real time, {task.fields[rate]:,.0f} requests per CPU second"
_PLAN = "{task.completed:,.0f} simulations, {task.fields[reused]:,} reused"
_PLAN_SPEED = "{task.fields[speed]:,.0f} requests per CPU second"
_PLAN_BEST = "{task.fields[best]}"


def _bar(*columns: ProgressColumn) -> Progress:
    # The bar runs on cores that a measured service may use, so it refreshes rarely.
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    return Progress(*columns, console=console, refresh_per_second=4, transient=True, disable=hidden)


@contextmanager
def load_progress(total: int) -> Iterator["OnChange"]:
    """Show the progress of the load generator inside a `with` statement. Yield a callback that updates it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with _bar(BarColumn(), TextColumn(_LOAD), TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=total, sent=0, done=0, failed=0)

        def on_change(counts: "LoadCounts") -> None:
            ended = counts.done + counts.failed
            bar.update(task, completed=ended, sent=counts.sent, done=counts.done, failed=counts.failed)

        yield on_change


@contextmanager
def measuring_progress(*more: ProgressColumn) -> Iterator[Callable[[str, float, float], None]]:
    """Show what is measured inside a `with` statement. Yield a callback that takes its name, what is done, and all."""
    with _bar(TextColumn("measuring {task.description}"), BarColumn(), *more, TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


@contextmanager
def stage_progress() -> Iterator[Callable[[str], None]]:
    """Show a description of the current work inside a `with` statement. Yield a callback that sets it."""
    with _bar(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)


@contextmanager
def simulation_progress(total: int | None) -> Iterator[SimulationTick | None]:
    """Show the progress of a simulation on a terminal inside a `with` statement. Yield a callback that updates it."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = BarColumn(), TextColumn(_SIMULATION), TextColumn(_SIMULATION_SPEED), TimeElapsedColumn()
    with _bar(*columns) as bar:
        task = bar.add_task("", total=total, simulated=0.0, speed=0.0, rate=0.0)
        start, cpu_start, shown = time.monotonic(), time.process_time(), 0.0

        def tick(ended: int, simulated_s: float) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown >= _UPDATE_S:
                shown = now
                speed = simulated_s / max(now - start, 1e-9)
                rate = ended / max(time.process_time() - cpu_start, 1e-9)
                bar.update(task, completed=ended, simulated=simulated_s, speed=speed, rate=rate)

        yield tick


def trace_progress(requests: Iterable[Request]) -> Iterator[Request]:
    """Yield the requests of a trace, and show their number if reading takes over a second."""
    if not sys.stderr.isatty():
        yield from requests
        return
    start, bar = time.monotonic(), None
    with ExitStack() as stack:
        for count, request in enumerate(requests):
            if count % _TRACE_STEP == 0 and time.monotonic() - start > TRACE_PATIENCE_S:
                if bar is None:
                    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} requests"), TimeElapsedColumn())
                    bar = stack.enter_context(_bar(*columns))
                    bar.add_task("", total=None)
                bar.update(bar.task_ids[0], completed=count)
            yield request


class PlanProgress:
    """Progress display of the search for a plan: number of simulations, and best design so far."""

    def __init__(self, objective: "Objective", bar: Progress) -> None:
        self._objective, self._bar = objective, bar
        self._best: DesignChoice | None = None
        self._task = bar.add_task("", total=None, reused=0, speed=0.0, best="")

    def evaluated(self, effort: "Effort", trial: "Trial", evaluation: "Evaluation") -> None:
        """Update the displayed number of simulations."""
        speed = effort.requests_per_cpu_s or 0.0
        self._bar.update(self._task, completed=effort.simulations, reused=effort.reused, speed=speed)

    def found(self, choice: "DesignChoice") -> None:
        """Update the displayed best design."""
        if self._best is None or self._cost(choice) < self._cost(self._best):
            self._best = choice
        design, rate = self._best.design, self._best.highest_rate
        costs = f"${design.price_per_h:,.0f}/h, {design.tdp_w / 1e3:,.0f} kW"
        self._bar.update(self._task, best=f"best so far: {design.name}, {rate:.3g} requests/s, {costs}")

    def _cost(self, choice: "DesignChoice") -> tuple[float, ...]:
        if self._objective == "throughput":
            return (-choice.highest_rate,)
        return self._objective.weigh(choice.design)


@contextmanager
def plan_progress(objective: "Objective") -> Iterator[PlanProgress]:
    """Return a context manager that shows the progress of the search for a plan, if stderr is a terminal."""
    columns = (SpinnerColumn(), TextColumn(_PLAN), TextColumn(_PLAN_SPEED), TimeElapsedColumn(), TextColumn(_PLAN_BEST))
    with _bar(*columns) as bar:
        yield PlanProgress(objective, bar)
