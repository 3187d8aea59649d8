"""HTML report of characterized instances: a check of Splitwise's insights, a comparison table, and charts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from twofold.characterize.analysis import Characterization
from twofold.characterize.report.insights import Finding, Insight
from twofold.characterize.report.tables import findings, percent
from twofold.reporting.chart import ReportChart
from twofold.reporting.page import html_chart, html_page, html_section, html_table
from twofold.reporting.summary import NOTHING

_CLASSES: Final = {Finding.HOLDS: "met", Finding.FAILS: "missed", Finding.UNKNOWN: ""}
_PROMPT, _BATCH, _CONTEXT = 1500, 16, 1024


def html_report(
    found: Sequence[Characterization],
    judged: Mapping[str, Sequence[Insight]],
    drawn: Sequence[ReportChart],
    *,
    title: str,
) -> str:
    """Return the HTML report."""
    body = [html_section(f"Insights of Splitwise: {name}", _insights(each)) for name, each in judged.items()]
    body += [html_chart(chart) for chart in drawn]
    return html_page(title, [*body, html_section("Instances", _instances(found))])


def _insights(judged: Sequence[Insight]) -> str:
    rows = [(str(each.number), each.claim, (each.verdict, _CLASSES[each.verdict]), each.evidence) for each in judged]
    return html_table(("", "insight", "", "evidence"), rows, (0,))


def _instances(found: Sequence[Characterization]) -> str:
    columns = [dict(_facts(each)) for each in found]
    headings = ["", *(each.name for each in found)]
    compared = len(found) == 2
    if compared:
        columns.append(_ratios(*found))
        headings.append("ratio")
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(label, *(column.get(label, NOTHING) for column in columns)) for label in labels]
    return html_table(headings, rows, (3,) if compared else ())


def _facts(found: Characterization) -> Iterator[tuple[str, str]]:
    times, costs = found.times, found.profile.costs
    yield "engine", found.profile.engine
    yield "measured", f"{found.profile.date}, {times.iterations} distinct measurements"
    yield "TTFT, 1,500 tokens", f"{found.ttft_s(_PROMPT) * 1e3:.4g} ms"
    yield "TBT, 16 sequences of 1,024 tokens", f"{_tbt_s(found) * 1e3:.4g} ms"
    errors = (times.prefill_error, times.decode_error, times.mixed_error)
    yield "median held-out error of prefill, decode, mixed", ", ".join(percent(error) for error in errors)
    yield from findings(found)
    yield "price", f"${costs.price_per_h:.2f}/h" if costs.price_per_h else NOTHING
    yield "provisioned power", f"{costs.tdp_w:,.0f} W" if costs.tdp_w else NOTHING


def _tbt_s(found: Characterization) -> float:
    return _BATCH / found.decode_rate(_BATCH, _CONTEXT)


def _ratios(one: Characterization, other: Characterization) -> dict[str, str]:
    pairs = {
        "TTFT, 1,500 tokens": (one.ttft_s(_PROMPT), other.ttft_s(_PROMPT)),
        "TBT, 16 sequences of 1,024 tokens": (_tbt_s(one), _tbt_s(other)),
        "KV capacity": (one.profile.kv_capacity_tokens, other.profile.kv_capacity_tokens),
        "price": (one.profile.costs.price_per_h, other.profile.costs.price_per_h),
        "provisioned power": (one.profile.costs.tdp_w, other.profile.costs.tdp_w),
    }
    return {label: f"{second / first:.2f}x" for label, (first, second) in pairs.items() if first and second}
