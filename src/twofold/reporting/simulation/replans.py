"""The log of re-planning: as a table for the terminal, and as it goes into the JSON."""

from collections.abc import Sequence

import msgspec
from rich.markup import escape
from rich.table import Table

from twofold.reporting.tables import seconds
from twofold.scheduling.replan_log import Decision


class ReplanEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, and the sentence that says it."""

    text: str
    decision: Decision


def replan_entries(log: Sequence[Decision]) -> tuple[ReplanEntry, ...]:
    return tuple(ReplanEntry(text=str(decision), decision=decision) for decision in log)


def replan_table(log: Sequence[Decision]) -> Table:
    """A row for each decision, in the order of time."""
    table = Table(title="Re-planning", title_justify="left", show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for decision in log:
        table.add_row(seconds(decision.at_s), escape(str(decision)))
    if not log:
        table.add_row("", "the traffic has not shifted")
    return table
