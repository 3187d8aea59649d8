"""The count of a long reading appears on a terminal only, and takes nothing away from what is read."""

import sys

from support.traces import ask
from twofold.cli import progress as trace_progress


def test_nothing_is_shown_where_stderr_is_no_terminal(capsys, monkeypatch):
    """Logs and pipes stay clean, however long it takes."""
    monkeypatch.setattr(trace_progress, "PATIENCE_S", -1.0)
    requests = [ask(index) for index in range(3)]
    assert list(trace_progress.watched(requests)) == requests
    assert capsys.readouterr().err == ""


def test_count_is_shown_on_a_terminal_once_it_takes_long(capsys, monkeypatch):
    """Every request passes, and the terminal sees how many there were."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(trace_progress, "PATIENCE_S", float("inf"))
    requests = [ask(index) for index in range(2000)]
    assert list(trace_progress.watched(requests)) == requests
    assert capsys.readouterr().err == "", "not long yet"
    monkeypatch.setattr(trace_progress, "PATIENCE_S", -1.0)
    monkeypatch.setenv("TERM", "xterm")
    assert list(trace_progress.watched(requests)) == requests
    assert "1,024 requests" in capsys.readouterr().err
