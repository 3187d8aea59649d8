"""Observers that write files: an event log (JSON lines) and a request table (Parquet)."""

import os
import weakref
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.simulation.observers.base import IterationRun, KvTransfer, Observer
from twofold.timeline import Moment, Timeline

if TYPE_CHECKING:
    import pyarrow as pa


_BUFFER: Final = 1 << 20


class AtomicFile:
    """A file written beside `path` and renamed to it by `commit`; without a commit it is deleted.

    Devices and pipes are written directly. Raises ConfigurationError if the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ConfigurationError(f"{self.path} is a directory: name a file in it")
        direct = self.path.exists() and not self.path.is_file()
        self._target = self.path.resolve()
        self._part = self._target if direct else self._target.with_name(f".part-{os.getpid()}-{self._target.name}")
        try:
            self._stream: IO[bytes] = self._part.open("wb", buffering=_BUFFER)
        except OSError as error:
            raise self._unwritable(error) from error
        # Observers of a failed run are dropped, not closed: this deletes the file then, or at exit.
        self._discard = weakref.finalize(self, _discard, self._stream, None if direct else self._part)

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def write(self, data: bytes) -> None:
        try:
            self._stream.write(data)
        except OSError as error:
            raise self._unwritable(error) from error

    def commit(self) -> None:
        """Close the file and rename it to `path`."""
        try:
            self._stream.close()
            if self._part != self._target:
                self._part.replace(self._target)
        except OSError as error:
            self._discard()
            raise self._unwritable(error) from error
        self._discard.detach()

    def _unwritable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(f"{self.path} cannot be written: {error.strerror}")


def _discard(stream: IO[bytes], part: Path | None) -> None:
    with suppress(OSError):  # the file is deleted anyway
        stream.close()
    if part is not None:
        part.unlink(missing_ok=True)


_PS_PER_S: Final = 10**12

Value = str | int | float | None | msgspec.Raw | dict[str, float]


class EventLog(Observer):
    """Writes every event of a run as one JSON object per line; times are seconds with all their digits.

    The file gets its name at the end of the run. Raises ConfigurationError if `path` is not writable.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = AtomicFile(path)

    def run(self, run: IterationRun) -> None:
        counts = msgspec.structs.asdict(run)
        instance, start_ps, end_ps = counts.pop("instance"), counts.pop("start_ps"), counts.pop("end_ps")
        self._line("run", _seconds(end_ps), instance=instance, start_s=_seconds(start_ps), **counts)

    def transfer(self, transfer: KvTransfer) -> None:
        self._line(
            "transfer",
            _seconds(transfer.end_ps),
            request=transfer.request_id,
            source=transfer.source,
            target=transfer.target,
            start_s=_seconds(transfer.start_ps),
            bytes=transfer.bytes,
        )

    def ended(self, timeline: Timeline, now: float) -> None:
        request, moments = timeline.request, timeline.moments
        self._line(
            "ended",
            max(moments.values(), default=request.arrival_s),
            request=request.id,
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=timeline.output_tokens,
            finish_reason=timeline.finish_reason,
            prefill_instance=timeline.prefill_instance,
            decode_instance=timeline.decode_instance,
            preemptions=timeline.preemptions,
            moments={moment.value: moments[moment] for moment in Moment if moment in moments},
        )

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        self._line("role", _seconds(at_ps), instance=instance, role=role)

    def note(self, at_ps: int, kind: str, subject: str, detail: str) -> None:
        self._line("note", _seconds(at_ps), kind=kind, subject=subject, detail=detail)

    def close(self, at_ps: int) -> None:
        self._line("close", _seconds(at_ps))
        self._file.commit()

    def _line(self, event: str, at_s: Value, **values: Value) -> None:
        line: dict[str, Value] = {"at_s": at_s, "event": event, **values}
        self._file.write(msgspec.json.encode(line) + b"\n")


def _seconds(ps: int) -> msgspec.Raw:
    """The decimal number itself: 1.000000000001, not the float beside it."""
    whole, rest = divmod(ps, _PS_PER_S)
    return msgspec.Raw(f"{whole}.{rest:012d}".rstrip("0").removesuffix("."))


ROWS_PER_GROUP: Final = 10_000

_COLUMNS: Final = [  # name, type, whether it may be null, attribute of a timeline
    ("id", "str", False, "request.id"),
    ("arrival_s", "float", False, "request.arrival_s"),
    ("prompt_tokens", "int", False, "request.prompt_tokens"),
    ("output_tokens", "int", False, "output_tokens"),
    ("finish_reason", "str", True, "finish_reason"),
    *((name, "float", True, name) for name in ("ttft_s", "tpot_s", "e2e_s", "queue_prefill_s", "prefill_s")),
    *((name, "float", True, name) for name in ("transfer_s", "visible_transfer_s", "queue_decode_s")),
    ("prefill_instance", "str", True, "prefill_instance"),
    ("decode_instance", "str", True, "decode_instance"),
    ("preemptions", "int", False, "preemptions"),
]
_VALUES: Final = attrgetter(*(attribute for *_, attribute in _COLUMNS))


class ParquetTable(Observer):
    """Writes one row per ended request, in order of completion; at most one row group is held in memory.

    Times are seconds, as `Timeline` defines them, and null where they do not apply. The file gets its name at the end
    of the run. Raises ConfigurationError if `path` is not writable or pyarrow is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from pyarrow import parquet  # noqa: PLC0415  (slow to import)
        except ImportError as error:
            raise ConfigurationError(f"{path}: a Parquet table needs pyarrow: pip install pyarrow") from error
        self._file = AtomicFile(path)
        self._schema = _schema()
        self._rows: list[tuple[str | float | None, ...]] = []
        self._writer = parquet.ParquetWriter(self._file, self._schema)
        # After a failed run nothing closes the writer: pyarrow would, after the file is deleted.
        weakref.finalize(self, self._writer.close)

    def ended(self, timeline: Timeline, now: float) -> None:
        self._rows.append(_VALUES(timeline))
        if len(self._rows) == ROWS_PER_GROUP:
            self._flush()

    def close(self, at_ps: int) -> None:
        if self._rows:
            self._flush()
        self._writer.close()
        self._file.commit()

    def _flush(self) -> None:
        import pyarrow as pa  # noqa: PLC0415  (slow to import)

        columns = [
            pa.array(values, type=field.type)
            for values, field in zip(zip(*self._rows, strict=True), self._schema, strict=True)
        ]
        self._rows.clear()
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))


def _schema() -> "pa.Schema":
    import pyarrow as pa  # noqa: PLC0415  (slow to import)

    types = {"int": pa.int64(), "float": pa.float64(), "str": pa.string()}
    return pa.schema([pa.field(name, types[kind], nullable=nullable) for name, kind, nullable, _ in _COLUMNS])
