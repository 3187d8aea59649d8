"""Tables and JSON for all reports."""

from collections.abc import Container, Sequence
from typing import Any

import msgspec
from rich.table import Table


def table(title: str | None, headings: Sequence[str], right: Container[int] = (), *, show_header: bool = True) -> Table:
    """An empty table; the columns at the indices `right` are aligned to the right."""
    made = Table(title=title, title_justify="left", show_header=show_header)
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="right" if index in right else "left")
    return made


class JsonReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report in JSON."""

    def json(self) -> str:
        """Format as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def same_fields(kind: type[msgspec.Struct], source: object, *, without: Container[str] = ()) -> dict[str, Any]:
    """The values of all fields that `kind` and `source` have in common, by name."""
    names = (name for name in kind.__struct_fields__ if name not in without)
    return {name: getattr(source, name) for name in names if hasattr(source, name)}
