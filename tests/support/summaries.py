"""Summaries of small runs, and the cells of tables as drawn in a terminal."""

import io

from rich.console import Console

from twofold.events import Recorder
from twofold.reporting.summary import summarize
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
