"""Print Markdown tables and progress messages, and format ratios."""

import sys
from collections.abc import Iterable, Sequence


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table with the first column left-aligned and all others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return f"| {' | '.join(cells)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    print(f"\n{title}\n")
    print(text(lines[0]))
    print(f"| {' | '.join(rule)} |")
    for line in lines[1:]:
        print(text(line))


def progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def times(value: float, base: float) -> str:
    """Format a ratio as `1.40×`; a dash for a division by zero."""
    return f"{value / base:.2f}×" if base else "—"


def percent(value: float, base: float) -> str:
    """Format a relative difference as `−19%`."""
    return f"{value / base - 1:+.0%}".replace("-", "−")


def split_name(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))
