"""A table of the requests of a run, one row each, as a Parquet file."""

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twofold.errors import ConfigurationError
from twofold.simulation.observer import QuietObserver
from twofold.simulation.whole_file import WholeFile
from twofold.timeline import Timeline

if TYPE_CHECKING:  # slow to import, and needed only by those who want a table
    import pyarrow as pa

ROWS_PER_GROUP: Final = 10_000

Row = tuple[str | float | None, ...]


class ParquetTable(QuietObserver):
    """A row for each request that ended, in that order; only the rows of one row group are held in memory.

    Times are seconds, as `Timeline` defines them; what did not happen to a request is null. The file has its
    name once the run is over. Raises ConfigurationError if `path` cannot be written to or pyarrow is missing.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from pyarrow import parquet  # noqa: PLC0415  (see above)
        except ImportError as error:
            raise ConfigurationError(
                f"{path}: a Parquet table needs pyarrow, which is not here: pip install pyarrow"
            ) from error
        self._file = WholeFile(path)
        self._schema = _schema()
        self._rows: list[Row] = []
        self._writer = parquet.ParquetWriter(self._file, self._schema)
        # Of a broken run nothing closes it: pyarrow would do so last, when the file under it is already gone.
        weakref.finalize(self, self._writer.close)

    def ended(self, timeline: Timeline) -> None:
        self._rows.append(_row(timeline))
        if len(self._rows) == ROWS_PER_GROUP:
            self._flush()

    def close(self, at_ps: int) -> None:  # noqa: ARG002  (the seam's argument)
        if self._rows:
            self._flush()
        self._writer.close()
        self._file.commit()

    def _flush(self) -> None:
        import pyarrow as pa  # noqa: PLC0415  (see above)

        columns = [
            pa.array(values, type=field.type)
            for values, field in zip(zip(*self._rows, strict=True), self._schema, strict=True)
        ]
        self._rows.clear()
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))


def _schema() -> "pa.Schema":
    import pyarrow as pa  # noqa: PLC0415  (see above)

    def always(name: str, kind: "pa.DataType") -> "pa.Field":
        return pa.field(name, kind, nullable=False)

    return pa.schema(
        [
            always("id", pa.string()),
            always("arrival_s", pa.float64()),
            always("prompt_tokens", pa.int64()),
            always("output_tokens", pa.int64()),
            pa.field("finish_reason", pa.string()),
            pa.field("ttft_s", pa.float64()),
            pa.field("tpot_s", pa.float64()),
            pa.field("e2e_s", pa.float64()),
            pa.field("queue_prefill_s", pa.float64()),
            pa.field("prefill_s", pa.float64()),
            pa.field("transfer_s", pa.float64()),
            pa.field("visible_transfer_s", pa.float64()),
            pa.field("queue_decode_s", pa.float64()),
            pa.field("prefill_instance", pa.string()),
            pa.field("decode_instance", pa.string()),
            always("preemptions", pa.int64()),
        ]
    )


def _row(timeline: Timeline) -> Row:
    """In the order of the schema."""
    request = timeline.request
    return (
        request.id,
        request.arrival_s,
        request.prompt_tokens,
        timeline.output_tokens,
        timeline.finish_reason,
        timeline.ttft_s,
        timeline.tpot_s,
        timeline.e2e_s,
        timeline.queue_prefill_s,
        timeline.prefill_s,
        timeline.transfer_s,
        timeline.visible_transfer_s,
        timeline.queue_decode_s,
        timeline.prefill_instance,
        timeline.decode_instance,
        timeline.preemptions,
    )
