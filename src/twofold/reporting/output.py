"""Terminal tables, JSON and data frames, shared by all reports."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from twofold import __version__
from twofold.errors import ConfigurationError

if TYPE_CHECKING:  # slow to import, or not installed
    import pyarrow as pa


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
    """Return the attributes of `source` that are also fields of the struct type `kind`, as a dict from
    name to value.

    Fields named in `without` are left out.
    """
    names = (name for name in kind.__struct_fields__ if name not in without)
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


class Tabular(ABC):
    """Base class of objects that are also a table: for pandas, Polars, DuckDB and others that read Arrow."""

    @abstractmethod
    def to_arrow(self) -> "pa.Table":
        """Return the table as a `pyarrow.Table`."""

    def to_pandas(self) -> Any:  # noqa: ANN401  (pandas may be missing)
        """Return the table as a `pandas.DataFrame`. Raises ConfigurationError if pandas is not installed."""
        _require_package("pandas", "to_pandas")
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:  # noqa: ANN401  (Polars may be missing)
        """Return the table as a `polars.DataFrame`. Raises ConfigurationError if Polars is not installed."""
        return _require_package("polars", "to_polars").from_arrow(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the table in Arrow's C stream interface, as `polars.DataFrame(…)` and others read it."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)


def _require_package(name: str, method: str) -> Any:  # noqa: ANN401
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"{method} needs {name}: pip install {name}") from error
