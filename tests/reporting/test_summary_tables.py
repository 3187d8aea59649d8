"""Terminal tables of summaries: units, rows and columns."""

import io

from rich.console import Console

from twofold.events import Recorder
from twofold.reporting.summary import comparison_table, seconds, summarize, summary_table
from twofold.request import FinishReason, Request
from twofold.slo import Slo


def run_of(ttft_s, failed=0):
    recorder, lines = Recorder(), []
    for number in range(2 + failed):
        name = str(number)
        recorder.arrive(Request(id=name, arrival_s=0.0, prompt_tokens=5, output_tokens=2), 0.0)
        recorder.token(name, ttft_s)
        recorder.token(name, ttft_s + 0.025)
        lines.append(recorder.end(name, FinishReason.LENGTH if number < 2 else FinishReason.ERROR))
    return summarize(lines, slo=Slo(ttft_s=1.0, tpot_s=0.1), errors={"2": "HTTP 429"})


def drawn(table):
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()


def cells(text, label):
    """Return the cells of the table row that starts with a label."""
    (line,) = [line for line in text.splitlines() if line.strip("│ ").startswith(label)]
    return [cell.strip() for cell in line.strip("│┃ ").split("│")]


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


def test_runs_side_by_side():
    text = drawn(comparison_table({"split": run_of(0.2), "colocated": run_of(2.0, failed=1)}))
    assert cells(text, "TTFT P99") == ["TTFT P99", "200.0 ms ◀", "2.00 s"]
    assert cells(text, "Within the SLO")[1:] == ["100.0% ◀", "0.0%"]
    assert cells(text, "Gap between tokens P99")[1:] == ["25.00 ms", "25.00 ms"], "equal values have no mark"


def test_an_empty_run_has_no_best():
    text = drawn(comparison_table({"split": run_of(0.2), "none": summarize([])}))
    assert cells(text, "TTFT P50")[1:] == ["200.0 ms ◀", "-"]
    assert cells(text, "Within the SLO")[1:] == ["100.0% ◀", "-"]


def test_an_empty_run_draws():
    text = drawn(summary_table(summarize([])))
    assert cells(text, "TTFT")[1:] == ["-"] * 5
