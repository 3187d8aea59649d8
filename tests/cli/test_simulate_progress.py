"""The bar of a simulation: only for eyes, and only now and then."""

import sys

from twofold.cli.progress import simulation_progress


def test_nobody_watches_a_file():
    """Where stderr is no terminal the simulator is not asked to report at all."""
    with simulation_progress(10) as ticked:
        assert ticked is None


def test_a_terminal_shows_counts_and_speed(monkeypatch, capsys):
    """Requests ended, time simulated, and how fast both go."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with simulation_progress(5000) as ticked:
        ticked(1234, 56.7)
    shown = capsys.readouterr().err
    for expected in ("1,234 requests, 56.7 s simulated", "× real time", "requests per CPU second"):
        assert expected in shown
