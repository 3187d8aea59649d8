"""Tables of the results of four_way.py, for the terminal and as Markdown."""

from collections.abc import Iterable, Mapping, Sequence

from compared import SYSTEMS
from outside_client import Measured
from rich.table import Table

ATTAINED = 0.9  # required attainment, as in DistServe (OSDI'24)
NAMES = (
    "system",
    "requests/s",
    "within SLO",
    "goodput, requests/s",
    "TTFT P50 / P99, ms",
    "TPOT P50 / P99, ms",
    "ITL P50 / P99, ms",
    "output tokens/s",
    "same answers",
)


def rows(results: Mapping[str, Sequence[Measured]]) -> Iterable[list[str]]:
    """Yield one row per system and rate."""
    # Answers are compared with the first system's answers at the same rate.
    first = next((results[name] for name in SYSTEMS if name in results), [])
    answers = {each.rate: each.answers for each in first}
    for name in SYSTEMS:
        for each in results.get(name, []):
            theirs = answers.get(each.rate, [])
            same = sum(ours == other for ours, other in zip(each.answers, theirs, strict=False))
            yield [
                name,
                f"{each.rate:g}",
                f"{each.attainment:.0%}",
                f"{each.goodput:.2f}",
                f"{each.p50_ttft_ms:,.0f} / {each.p99_ttft_ms:,.0f}",
                f"{each.p50_tpot_ms:.1f} / {each.p99_tpot_ms:.1f}",
                f"{each.p50_itl_ms:.1f} / {each.p99_itl_ms:.1f}",
                f"{each.output_tokens_per_s:.0f}",
                f"{same} of {each.sent}",
            ]


def sustained(measured: Sequence[Measured]) -> float | None:
    """Return the highest sustained rate, or None if the lowest measured rate is not sustained.

    A rate is sustained if at least 90% of requests met the SLO at this rate and at every lower measured rate.
    """
    best = None
    for each in sorted(measured, key=lambda each: each.rate):
        if each.attainment < ATTAINED:
            break
        best = each.rate
    return best


def terminal(results: Mapping[str, Sequence[Measured]], title: str) -> Table:
    drawn = Table(title=title, title_justify="left")
    for number, name in enumerate(NAMES):
        drawn.add_column(name, justify="right" if number else "left", no_wrap=not number)
    for row in rows(results):
        drawn.add_row(*row)
    return drawn


def markdown(results: Mapping[str, Sequence[Measured]], title: str) -> str:
    """Return the results as a Markdown table, with the sustained rate of each system."""
    lines = [title, "", _line(NAMES), _line(["---", *["---:"] * (len(NAMES) - 1)])]
    lines += [_line(row) for row in rows(results)]
    lines += ["", f"Highest of these rates at which at least {ATTAINED:.0%} of requests met the SLO:", ""]
    for name, measured in results.items():
        rate = sustained(measured)
        lines.append(f"- {SYSTEMS[name].title}: {'none' if rate is None else f'{rate:g} requests/s'}")
    return "\n".join([*lines, ""])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
