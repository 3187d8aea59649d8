"""One page about one plan: a single file that opens without a network."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from twofold.planning.advice import Advice
from twofold.planning.curves import Curve
from twofold.planning.pareto import Point
from twofold.planning.plan import Plan
from twofold.reporting.plan.design_facts import HEADINGS, choice_row
from twofold.reporting.plan.pictures import curves_picture, pareto_picture
from twofold.reporting.simulation.facts import slo_text
from twofold.reporting.simulation.picture import Picture
from twofold.slo import Slo, SlowdownSlo

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 1.8em 0 .3em } p { margin: .3em 0; color: #555 }
table { border-collapse: collapse } th, td { padding: .2em .8em; text-align: right; border-bottom: 1px solid #e5e5e5 }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left }
.advice { color: #222; font-weight: 600 }
"""


def plan_page(
    plan: Plan,
    advice: Advice,
    front: Sequence[Point],
    curves: Mapping[str, Curve],
    *,
    slo: Slo | SlowdownSlo,
    title: str,
) -> str:
    """The page, about 5 MB of which are plotly.js."""
    from plotly.io import to_html  # noqa: PLC0415 (too heavy for those who want no page)

    body = [f"<h1>{escape(title)}</h1>", f"<p>SLO: {escape(slo_text(slo))}</p>"]
    body += [
        f'<p class="advice">{escape(advice.text)}</p>',
        "<h2>The best of each family</h2>",
        _choices(plan),
    ]
    for index, picture in enumerate((pareto_picture(plan, front), curves_picture(curves, slo))):
        figure = {"data": picture.traces, "layout": picture.layout}
        drawn = to_html(figure, full_html=False, include_plotlyjs=index == 0, div_id=picture.id)
        body += [*_heading(picture), drawn]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    text = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{text}\n</body></html>\n'


def _heading(picture: Picture) -> Iterator[str]:
    yield f"<h2>{escape(picture.title)}</h2>"
    yield f"<p>{escape(picture.note)}</p>"


def _choices(plan: Plan) -> str:
    rows = [_row(choice_row(choice), "td") for choice in plan.choices]
    return f"<table><thead>{_row(HEADINGS, 'th')}</thead><tbody>{''.join(rows)}</tbody></table>"


def _row(texts: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(text)}</{tag}>' for text in texts)}</tr>"
