"""Terminal tables of summaries: units, rows and columns."""

from support.summaries import cells, drawn, run_of
from twofold.reporting.summary import seconds, summarize, summary_table


def test_units():
    """Durations below a second are in milliseconds, longer ones in seconds, and None is a dash."""
    assert seconds(0.00123) == "1.23 ms"
    assert seconds(0.25) == "250.0 ms"
    assert seconds(1.5) == "1.50 s"
    assert seconds(12345.0) == "12,345 s"
    assert seconds(None) == "-"


def test_one_run():
    text = drawn(summary_table(run_of(1.5, failed=1), "a title", {"Send lag P99": "2 ms"}))
    assert "a title" in text
    assert cells(text, "TTFT ")[1:3] == ["1.50 s", "1.50 s"]
    assert cells(text, "ITL")[2] == "25.00 ms"
    assert cells(text, "HTTP 429")[1] == "1"
    assert cells(text, "Completed")[1] == "2"
    assert cells(text, "SLO attainment")[1] == "0.0%"
    assert cells(text, "Send lag P99")[1] == "2 ms"


def test_an_empty_run_draws():
    text = drawn(summary_table(summarize([])))
    assert cells(text, "TTFT")[1:] == ["-"] * 5
