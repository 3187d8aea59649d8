"""Self-contained HTML pages with tables and charts, and export of charts to PNG files."""

import base64
import zlib
from collections.abc import Container, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.reporting.chart import Layout, ReportChart

Cell = tuple[str, str]  # a cell with a CSS class

# Pages follow the light or dark mode of the reader's system. The colours are those of page.css.
_DARK_BACKGROUND, _DARK_TEXT, _DARK_GRID = "#16181d", "#dddddd", "#3a3d44"
_WIDTH_PX, _SCALE = 800, 2
_GZIP: Final = 16 + zlib.MAX_WBITS  # argument of zlib for the format of gzip


def html_page(title: str, body: Sequence[str]) -> str:
    """Return an HTML page with a title and the lines of the body. The page includes plotly.js (1.8 MB)."""
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 (slow to import)

    style, draw = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>{escape(title)}</title><style>{style}</style>'
    # plotly.js has 4.8 MB, and 1.8 MB compressed and in base 85.
    gzip = zlib.compress(get_plotlyjs().encode(), wbits=_GZIP)
    packed = base64.b85encode(gzip, pad=True).decode()  # has no </script, as / is none of its digits
    library = f'<script type="text/plain" id="plotly" data-bytes="{len(gzip)}">{packed}</script>'
    text = "\n".join([f"<h1>{escape(title)}</h1>", *body, library, f'<script type="module">{draw}</script>'])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{text}\n</body></html>\n'


def html_section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str | Cell]], right: Container[int] = ()) -> str:
    """Return an HTML table. `right` has the indices of the columns of numbers."""
    head = f"<thead>{_row(headings, 'th', right)}</thead>" if headings else ""
    return f"<table>{head}<tbody>{''.join(_row(row, 'td', right) for row in rows)}</tbody></table>"


def _row(cells: Sequence[str | Cell], tag: str, right: Container[int]) -> str:
    row = ""
    for place, cell in enumerate(cells):
        text, kind = (cell, "number" if place in right else "") if isinstance(cell, str) else cell
        attribute = f' class="{kind}"' if kind else ""
        row += f"<{tag}{attribute}>{escape(text)}</{tag}>"
    return f"<tr>{row}</tr>"


def html_chart(chart: ReportChart) -> str:
    """Return the HTML of a chart, including its data."""
    figure = {"traces": chart.traces, "layout": chart.layout, "dark": dark_changes(chart.layout)}
    name, safe = escape(chart.id), msgspec.json.encode(figure).decode().replace("<", "\\u003c")
    # In the script element, each `<` must be escaped.
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    script = f'<script type="application/json" data-picture="{name}">{safe}</script>'
    return html_section(chart.title, f'{note}<div id="{name}"></div>{script}')


def dark_changes(layout: Layout) -> dict[str, str]:
    """Return the changes for `Plotly.relayout` that give a plotly layout dark colours."""
    axes = [name for name in layout if name.startswith(("xaxis", "yaxis"))]
    return {
        "paper_bgcolor": _DARK_BACKGROUND,
        "plot_bgcolor": _DARK_BACKGROUND,
        "font.color": _DARK_TEXT,
        **{f"{name}.gridcolor": _DARK_GRID for name in axes},
    }


def write_plots(charts: Sequence[ReportChart], folder: Path) -> list[Path]:
    """Write each chart to `folder` as PNG files for light and dark mode; return the paths. Raises ConfigurationError if
    kaleido or a browser (Chrome or Chromium) is missing.
    """
    import plotly.io  # noqa: PLC0415 (slow to import)

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make {folder}: {error.strerror}") from error
    figures: list[dict[str, Any]] = []
    paths: list[Path] = []
    for chart in charts:
        placed = {"title": {"text": chart.title, "x": 0.02}, "margin": {"l": 60, "r": 20, "t": 60, "b": 60}}
        titled = {**chart.layout, **placed, "legend": {"orientation": "h", "y": -0.2, "yanchor": "top"}}
        for dark, suffix in ((False, ""), (True, "-dark")):
            figures.append({"data": chart.traces, "layout": _changed(titled, dark_changes(titled) if dark else {})})
            paths.append(folder / f"{chart.id}{suffix}.png")
    try:
        plotly.io.write_images(figures, paths, width=_WIDTH_PX, scale=_SCALE)
    except (ImportError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"--plots needs `pip install kaleido`, and Chrome or Chromium: {reason}") from error
    return paths


def _changed(layout: Layout, changes: dict[str, str]) -> dict[str, Any]:
    """Return a copy of a plotly layout with the values in `changes`. The keys of `changes` are dotted paths."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(layout))
    for path, value in changes.items():
        *above, last = path.split(".")
        inner = made
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return made
