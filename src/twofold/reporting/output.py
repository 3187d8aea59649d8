"""Terminal tables and JSON, shared by all reports."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import msgspec
from rich.table import Table

from twofold import __version__


def table(
    title: str | None,
    headings: Sequence[str],
    right: Container[int] = (),
    rows: Iterable[Iterable[str]] = (),
    *,
    show_header: bool = True,
) -> Table:
    """Create a terminal table. `right` has the indices of the right-aligned columns."""
    made = Table(title=title, title_justify="left", show_header=show_header)
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="right" if index in right else "left")
    for row in rows:
        made.add_row(*row)
    return made


class JsonReport(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of reports that are printed as JSON."""

    twofold_version: str = __version__

    def json(self) -> str:
        return json_text(self)


def json_text(facts: object) -> str:
    """Format facts as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(facts), indent=2).decode()


def same_fields(kind: type[msgspec.Struct], source: object, *, without: Container[str] = ()) -> dict[str, Any]:
    """Return the attributes of `source` that are fields of the struct type `kind`, by name, except for `without`."""
    names = (name for name in kind.__struct_fields__ if name not in without)
    return {name: getattr(source, name) for name in names if hasattr(source, name)}
