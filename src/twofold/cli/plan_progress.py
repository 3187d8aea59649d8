"""How far a plan has come: on stderr, and only where that is a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from twofold.planning.evaluation import Evaluation, Trial
from twofold.planning.evaluator import Effort
from twofold.planning.plan import DesignChoice
from twofold.planning.search import Objective

_DONE = "{task.completed:,.0f} simulations, {task.fields[reused]:,} reused"
_SPEED = "{task.fields[speed]:,.0f} requests per CPU second"
_BEST = "{task.fields[best]}"


class PlanProgress:
    """Follows a plan; draws where there is a bar."""

    def __init__(self, objective: Objective, bar: Progress | None) -> None:
        self._objective, self._bar = objective, bar
        self._best: DesignChoice | None = None
        self._task: TaskID | None = None
        if bar is not None:
            self._task = bar.add_task("", total=None, reused=0, speed=0.0, best="")

    def evaluated(self, effort: Effort, trial: Trial, evaluation: Evaluation) -> None:
        """A trial has its answer."""
        if self._bar is not None and self._task is not None:
            speed = effort.requests_per_cpu_s or 0.0
            self._bar.update(self._task, completed=effort.simulations, reused=effort.reused, speed=speed)

    def found(self, choice: DesignChoice) -> None:
        """The best of a family is known."""
        if self._best is None or self._weight(choice) < self._weight(self._best):
            self._best = choice
        if self._bar is not None and self._task is not None:
            design, rate = self._best.design, self._best.highest_rate
            costs = f"${design.price_per_h:,.0f}/h, {design.tdp_w / 1e3:,.0f} kW"
            text = f"best so far: {design.name}, {rate:.3g} requests/s, {costs}"
            self._bar.update(self._task, best=text)

    def _weight(self, choice: DesignChoice) -> tuple[float, ...]:
        if self._objective is Objective.THROUGHPUT:
            return (-choice.highest_rate,)
        return self._objective.weigh(choice.design)


@contextmanager
def plan_progress(objective: Objective) -> Iterator[PlanProgress]:
    """A line that follows the plan; it draws nothing where nobody would see it."""
    if not sys.stderr.isatty():
        yield PlanProgress(objective, None)
        return
    columns = SpinnerColumn(), TextColumn(_DONE), TextColumn(_SPEED), TimeElapsedColumn(), TextColumn(_BEST)
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bar:
        yield PlanProgress(objective, bar)
