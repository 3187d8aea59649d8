"""The table of `twofold verify`: what the service did and what the simulator says it does."""

from collections.abc import Sequence
from statistics import fmean

from rich.table import Table

from twofold.fidelity.verify import ATTAINMENT, Comparison, Figure
from twofold.reporting.tables import bounds, seconds


def fidelity_table(comparisons: Sequence[Comparison]) -> Table:
    """Every figure of every load: simulated as calibrated and at the speed of the replays, each live replay, their
    spread, the error and whether it is let pass."""
    replays = max(len(comparison.live) for comparison in comparisons)
    first = comparisons[0]
    slo = ", ".join(f"{name} {bound}" for name, bound in bounds(first.slo))
    title = f"{first.design}: simulated and live, SLO {slo}"
    table = Table(title=title, title_justify="left")
    for heading in (
        "requests/s",
        "",
        "as calibrated",
        "simulated",
        *(f"live {i + 1}" for i in range(replays)),
        "spread",
        "error",
        "",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for comparison in comparisons:
        said = iter((f"{comparison.rate:.3g}", f"host {speed_text(comparison)}"))
        for figure in comparison.figures():
            table.add_row(next(said, ""), *_cells(figure))
        table.add_section()
    return table


def speed_text(comparison: Comparison) -> str:
    """By how many times longer prompts and decodes took than calibrated, on the mean of the replays: `x1.04, x1.12`."""
    prompts, decodes = (fmean(each) for each in zip(*comparison.slowness, strict=True))
    return f"x{prompts:.2f}, x{decodes:.2f}"


def _cells(figure: Figure) -> tuple[str, ...]:
    shares = figure.name == ATTAINMENT
    both = figure.calibrated, figure.simulated, *figure.live
    values = [f"{value:.1%}" if shares else seconds(value) for value in both]
    spread, error = (f"{value * 100:+.1f}" for value in (figure.spread, figure.error))
    points = " points" if shares else "%"
    verdict = "ok" if figure.holds else f"over {figure.limit:.0%}".replace("%", points)
    return figure.name, *values, spread.lstrip("+") + points, error + points, verdict
