"""Simulations, traces and plans show progress bars, but only on a terminal."""

import io
import sys

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from support.analytic_cluster import AnalyticCluster, design
from support.plans import choice
from support.traces import ask
from twofold.cli import progress
from twofold.cli.progress import PlanProgress, plan_progress, simulation_progress, trace_progress
from twofold.planning.evaluation import Trial
from twofold.planning.evaluator import Effort
from twofold.planning.search import Objective


def test_no_simulation_progress_without_a_terminal():
    with simulation_progress(10) as tick:
        assert tick is None


def test_simulation_progress_shows_counts_and_speed(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with simulation_progress(5000) as tick:
        tick(1234, 56.7)
    shown = capsys.readouterr().err
    for expected in ("1,234 requests, 56.7 s simulated", "× real time", "requests per CPU second"):
        assert expected in shown


def test_no_trace_progress_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "TRACE_PATIENCE_S", -1.0)
    requests = [ask(index) for index in range(3)]
    assert list(trace_progress(requests)) == requests
    assert capsys.readouterr().err == ""


def test_trace_progress_appears_when_reading_is_slow(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "TRACE_PATIENCE_S", float("inf"))
    requests = [ask(index) for index in range(2000)]
    assert list(trace_progress(requests)) == requests
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "TRACE_PATIENCE_S", -1.0)
    monkeypatch.setenv("TERM", "xterm")
    assert list(trace_progress(requests)) == requests
    assert "1,024 requests" in capsys.readouterr().err


def test_plan_progress_shows_counts_and_the_best_design():
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    texts = (progress._PLAN, progress._PLAN_SPEED, progress._PLAN_BEST)
    bar = Progress(*map(TextColumn, texts), console=console, auto_refresh=False)
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
        "best so far: 5×fast prefill + 5×slow decode, 20",
    ):
        assert words in text, words


@pytest.mark.parametrize("objective", list(Objective))
def test_no_plan_progress_without_a_terminal(objective, capsys):
    with plan_progress(objective) as shown:
        shown.evaluated(Effort(), Trial(design(1, 1), 1.0), AnalyticCluster().judged(design(1, 1), 1.0))
        shown.found(choice(design(5, 5), 20.0))
    assert capsys.readouterr().err == ""
