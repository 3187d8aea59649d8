"""The tables of the page: one column, or one group of rows, for each run."""

from collections.abc import Mapping, Sequence
from html import escape

from twofold.performance.base import ModelError
from twofold.reporting.simulation.facts import Fact, check_text, design, facts
from twofold.reporting.simulation.table import ERROR_HEADING, HEADINGS, latency_rows
from twofold.reporting.tables import NOTHING
from twofold.simulation.result import SimulationResult
from twofold.simulation.verdict import Verdict

Cell = tuple[str, str]  # text and CSS class


def design_table(results: Mapping[str, SimulationResult]) -> str:
    """What was simulated, a column for each run."""
    return _side_by_side({name: design(result) for name, result in results.items()})


def facts_table(results: Mapping[str, SimulationResult]) -> str:
    """Counts, rates, energy and cost, a column for each run, with the model error beside each number."""
    return _side_by_side({name: facts(result) for name, result in results.items()})


def percentile_table(results: Mapping[str, SimulationResult], reference: ModelError | None = None) -> str:
    """The distributions: a row for each run of each."""
    rows: dict[str, list[list[Cell]]] = {}
    for name, result in results.items():
        for label, texts, error in latency_rows(result, reference):
            lead = [(label, "")] if len(results) == 1 else [(label, ""), (name, "")]
            rows.setdefault(label, []).append(lead + [(text, "number") for text in texts] + [(error, "")])
    lead = [("", "")] if len(results) == 1 else [("", ""), ("run", "")]
    headings = [*lead, *((heading, "number") for heading in HEADINGS), (ERROR_HEADING, "")]
    return _table(headings, [row for group in rows.values() for row in group])


def verdict_table(verdicts: Mapping[str, Verdict]) -> str:
    """Every check of every run: its value, its bound and whether it was met."""
    rows = [
        [(name, ""), (check.name, ""), *((text, "number") for text in check_text(check)), _met(check.met)]
        for name, judged in verdicts.items()
        for check in judged.checks
    ]
    return _table([("run", ""), ("check", ""), ("value", "number"), ("bound", "number"), ("", "")], rows)


def _met(met: bool) -> Cell:
    return ("met", "met") if met else ("missed", "missed")


def _side_by_side(runs: Mapping[str, Sequence[Fact]]) -> str:
    columns = [_column(said) for said in runs.values()]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [[(label, ""), *((column.get(label, NOTHING), "") for column in columns)] for label in labels]
    return _table([("", ""), *((name, "") for name in runs)] if len(runs) > 1 else [], rows)


def _column(said: Sequence[Fact]) -> dict[str, str]:
    """Texts by label; facts of one label, as two prefill pools give, share a cell."""
    column: dict[str, str] = {}
    for fact in said:
        earlier = column.get(fact.label)
        column[fact.label] = _value(fact) if earlier is None else f"{earlier}; {_value(fact)}"
    return column


def _value(fact: Fact) -> str:
    return f"{fact.value} ({fact.accuracy})" if fact.accuracy else fact.value


def _table(headings: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> str:
    head = f"<thead>{_row(headings, 'th')}</thead>" if headings else ""
    return f"<table>{head}<tbody>{''.join(_row(row, 'td') for row in rows)}</tbody></table>"


def _row(cells: Sequence[Cell], tag: str) -> str:
    return f"<tr>{''.join(_cell(text, kind, tag) for text, kind in cells)}</tr>"


def _cell(text: str, kind: str, tag: str) -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"
