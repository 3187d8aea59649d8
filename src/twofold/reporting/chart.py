"""Building blocks for plotly.js charts with a common style."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from twofold.instance import Role

Trace = dict[str, object]
Layout = dict[str, object]

# Phase colours of all charts, distinguishable for colour-blind readers.
PHASE_COLOURS: Final = {Role.PREFILL: "#0072B2", Role.DECODE: "#E69F00", Role.MIXED: "#009E73"}
# Run colours, distinct from phase colours, readable on light and dark pages.
RUN_COLOURS: Final = ("#7766CC", "#D55E00", "#44AA99", "#AA4499", "#56B4E9", "#999933", "#CC6677", "#888888")
BOUND_COLOUR: Final = "#C00000"
_GRID: Final = "#E5E5E5"
_ROW_PX: Final = 280
_SOLID: Final[Layout] = {"width": 1.5}


class ReportChart(msgspec.Struct, frozen=True, kw_only=True):
    """Chart of an HTML report, as plotly.js traces and layout. `id` must be unique on the page."""

    id: str
    title: str
    traces: list[Trace]
    layout: Layout
    note: str = ""


def run_colour(index: int) -> str:
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def axis(title: str, **more: object) -> Layout:
    """Return a plotly axis with a title, which should include the unit."""
    return {
        "title": {"text": title},
        "gridcolor": _GRID,
        "zeroline": False,
        "ticks": "outside",
        "automargin": True,
        **more,
    }


def log_axis(title: str) -> Layout:
    return axis(title, type="log", exponentformat="none", dtick=1)


def grid(rows: int, columns: int, axes: Sequence[tuple[Layout, Layout]], **more: object) -> Layout:
    """Return the plotly layout of `rows` × `columns` plots. `axes` has the x and y axis of each plot, row by row."""
    layout: Layout = {
        "height": _ROW_PX * rows + 80,
        "margin": {"l": 60, "r": 20, "t": 20, "b": 60},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "hovermode": "closest",
        **more,
    }
    if rows * columns > 1:
        layout["grid"] = {"rows": rows, "columns": columns, "pattern": "independent", "ygap": 0.3, "xgap": 0.14}
    for index, (x, y) in enumerate(axes):
        layout[f"xaxis{suffix(index)}"] = x
        layout[f"yaxis{suffix(index)}"] = y
    return layout


def on(plot: int) -> dict[str, object]:
    """Return the axis attributes of a plotly trace for plot number `plot` of a grid."""
    # Plots are counted from 0.
    return {"xaxis": f"x{suffix(plot)}", "yaxis": f"y{suffix(plot)}"}


def suffix(plot: int) -> str:
    """Return the suffix of plotly's axis names for plot `plot`: empty for plot 0, 2 for plot 1, 3 for plot 2."""
    return "" if plot == 0 else str(plot + 1)


def line(
    name: str, x: Iterable[float], y: Iterable[float], colour: str, look: Layout = _SOLID, /, **more: object
) -> Trace:
    """Return a plotly line trace. `look` sets the line's width in pixels, dashes and shape."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": rounded(x),
        "y": rounded(y),
        "line": {"color": colour, **look},
        **more,
    }


def markers(name: str, x: Iterable[float], y: Iterable[float], marker: Layout, /, **more: object) -> Trace:
    """Return a plotly trace of points. `marker` sets their colour, size and symbol."""
    return {"type": "scatter", "mode": "markers", "name": name, "x": list(x), "y": list(y), "marker": marker, **more}


def bars(name: str, x: Iterable[object], y: Iterable[object], colour: object, /, **more: object) -> Trace:
    """Return a plotly trace of bars in one colour, or in a colour each."""
    return {"type": "bar", "name": name, "x": list(x), "y": list(y), "marker": {"color": colour}, **more}


def labelled(run: str, text: str, runs: int) -> str:
    """Return a title or legend entry, with the name of the simulation if the page shows several."""
    return text if runs == 1 else f"{run}: {text}"


def rounded(values: Iterable[float]) -> list[float]:
    """Round values to six significant digits, so that the HTML file stays small."""
    return [float(f"{value:.6g}") for value in values]
