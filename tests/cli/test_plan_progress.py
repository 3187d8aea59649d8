"""The line on the terminal follows the plan."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from support.analytic_cluster import AnalyticCluster, design
from support.plans import choice
from twofold.cli.progress import _BEST, _PLAN_PROGRESS_DONE, _PLAN_PROGRESS_SPEED, PlanProgress, plan_progress
from twofold.planning.evaluation import Trial
from twofold.planning.evaluator import Effort
from twofold.planning.search import Objective


def test_it_says_how_far_and_the_best_so_far():
    """Simulations, speed, and the better of two designs."""
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    bar = Progress(
        *(TextColumn(text) for text in (_PLAN_PROGRESS_DONE, _PLAN_PROGRESS_SPEED, _BEST)), console=console, auto_refresh=False
    )
    shown = PlanProgress(Objective.THROUGHPUT, bar)
    effort = Effort(simulations=7, reused=2, requests=9_000, cpu_s=1.0)
    shown.evaluated(effort, Trial(design(1, 1), 1.0), AnalyticCluster().judged(design(1, 1), 1.0))
    shown.found(choice(design(5, 5), 20.0))
    shown.found(choice(design(9, 1), 10.0))
    with bar:
        bar.refresh()
    text = console.file.getvalue()
    for words in (
        "7 simulations, 2 reused",
        "9,000 requests per CPU second",
        "best so far: 5+5 fast+slow, 20",
    ):
        assert words in text, words


@pytest.mark.parametrize("objective", list(Objective))
def test_without_a_terminal_nothing_is_drawn(objective, capsys):
    """Logs stay clean."""
    with plan_progress(objective) as shown:
        shown.evaluated(Effort(), Trial(design(1, 1), 1.0), AnalyticCluster().judged(design(1, 1), 1.0))
        shown.found(choice(design(5, 5), 20.0))
    assert capsys.readouterr().err == ""
