"""Observers that write an event log (JSON lines), a table of requests (Parquet or in memory) and a Chrome trace."""

import weakref
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from twofold.atomic_file import AtomicFile
from twofold.instance import Role
from twofold.simulation.observers.base import IterationRun, KvTransfer, Observer
from twofold.timeline import Moment, Timeline

if TYPE_CHECKING:
    import pyarrow as pa

_PS_PER_S: Final = 10**12
_COUNTS: Final = ("iterations", "prefill_tokens", "prefill_sequences", "decode_sequences", "context_tokens")

Value = str | int | float | None | msgspec.Raw | dict[str, float]


class EventLog(Observer):
    """Writes events to `path`, as a JSON object per line with times in seconds. Raises ConfigurationError."""

    def __init__(self, path: str | Path) -> None:
        self._file = AtomicFile(path)

    def run(self, run: IterationRun) -> None:
        counts = {name: getattr(run, name) for name in _COUNTS}
        start_s, end_s = _seconds(run.start_ps), _seconds(run.end_ps)
        self._line("run", end_s, instance=run.instance, start_s=start_s, **counts, watts=run.watts)

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
    """Format picoseconds as exact decimal seconds, such as 1.000000000001."""
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


class RequestTable(Observer):
    """Keeps one row per ended request, with times in seconds (see `Timeline`)."""

    def __init__(self) -> None:
        self._rows: list[tuple[str | float | None, ...]] = []

    def ended(self, timeline: Timeline, now: float) -> None:
        self._rows.append(_VALUES(timeline))

    def table(self) -> "pa.Table":
        """Return the rows as a `pyarrow.Table`."""
        import pyarrow as pa  # noqa: PLC0415  (slow to import)

        schema = _schema()
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(schema.names)
        return pa.Table.from_pydict(dict(zip(schema.names, columns, strict=True)), schema=schema)


class ParquetTable(RequestTable):
    """Writes the rows to the Parquet file `path`. Raise ConfigurationError if the file is not writable."""

    def __init__(self, path: str | Path) -> None:
        from pyarrow import parquet  # noqa: PLC0415  (slow to import)

        super().__init__()
        self._file = AtomicFile(path)
        self._writer = parquet.ParquetWriter(self._file, _schema())
        # After a failed run, close the writer before the file is deleted; pyarrow would close it too late.
        weakref.finalize(self, self._writer.close)

    def ended(self, timeline: Timeline, now: float) -> None:
        super().ended(timeline, now)
        if len(self._rows) == ROWS_PER_GROUP:
            self._flush()

    def close(self, at_ps: int) -> None:
        if self._rows:
            self._flush()
        self._writer.close()
        self._file.commit()

    def _flush(self) -> None:
        self._writer.write_table(self.table())
        self._rows.clear()


def _schema() -> "pa.Schema":
    import pyarrow as pa  # noqa: PLC0415  (slow to import)

    types = {"int": pa.int64(), "float": pa.float64(), "str": pa.string()}
    return pa.schema([pa.field(name, types[kind], nullable=nullable) for name, kind, nullable, _ in _COLUMNS])


_PS_PER_US: Final = 1e6

Args = dict[str, str | int | float]
Event = dict[str, str | int | float | Args]


class _Track(msgspec.Struct):
    pid: int
    tid: int
    watts: float = 0.0  # last recorded power
    idle_since_ps: int = 0


class ChromeTrace(Observer):
    """Writes a trace for ui.perfetto.dev and chrome://tracing to the file `path`, with one process per pool and one
    thread per instance. Raise ConfigurationError if the file is not writable.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = AtomicFile(path)
        self._pools: dict[str, int] = {}
        self._tracks: dict[str, _Track] = {}
        self._transfers = 0
        self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        self._separator = b"\n"

    def run(self, run: IterationRun) -> None:
        track = self._track(run.instance)
        if run.start_ps > track.idle_since_ps:
            self._power(run.instance, track, track.idle_since_ps, 0.0)
        self._power(run.instance, track, run.start_ps, run.watts)
        track.idle_since_ps = run.end_ps
        phase = Role.PREFILL
        if run.decode_sequences:
            phase = Role.MIXED if run.prefill_tokens else Role.DECODE
        counts: Args = {name.replace("_", " "): getattr(run, name) for name in _COUNTS}
        self._event(
            {
                "ph": "X",
                "name": _title(run),
                "cat": phase,
                "pid": track.pid,
                "tid": track.tid,
                "ts": run.start_ps / _PS_PER_US,
                "dur": (run.end_ps - run.start_ps) / _PS_PER_US,
                "args": counts | {"W": run.watts},
            }
        )

    def transfer(self, transfer: KvTransfer) -> None:
        self._transfers += 1
        both: Event = {
            "name": f"KV to {transfer.target}",
            "cat": "transfer",
            "id": self._transfers,
            "pid": self._track(transfer.source).pid,
        }
        args: Args = {"request": transfer.request_id, "from": transfer.source, "bytes": transfer.bytes}
        self._event({"ph": "b", **both, "ts": transfer.start_ps / _PS_PER_US, "args": args})
        self._event({"ph": "e", **both, "ts": transfer.end_ps / _PS_PER_US})

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        if instance in self._tracks:
            self._instant(instance, at_ps, f"joins {role}", "")
        else:
            self._track(instance, role)

    def note(self, at_ps: int, kind: str, subject: str, detail: str) -> None:
        """Add a note about an instance to the instance's row in the trace. Ignore notes without an instance."""
        if subject in self._tracks:
            self._instant(subject, at_ps, kind, detail)

    def close(self, at_ps: int) -> None:
        for instance, track in self._tracks.items():
            self._power(instance, track, track.idle_since_ps, 0.0)
        self._file.write(b"\n]}\n")
        self._file.commit()

    def _track(self, instance: str, pool: str = "instances") -> _Track:
        if instance in self._tracks:
            return self._tracks[instance]
        if pool not in self._pools:
            self._pools[pool] = len(self._pools) + 1
            self._metadata("process", self._pools[pool], 0, pool)
        track = self._tracks[instance] = _Track(self._pools[pool], len(self._tracks) + 1)
        self._metadata("thread", track.pid, track.tid, instance)
        return track

    def _metadata(self, what: str, pid: int, tid: int, name: str) -> None:
        place: Event = {"ph": "M", "pid": pid, "tid": tid}
        self._event({**place, "name": f"{what}_name", "args": {"name": name}})
        self._event({**place, "name": f"{what}_sort_index", "args": {"sort_index": tid or pid}})

    def _power(self, instance: str, track: _Track, at_ps: int, watts: float) -> None:
        if watts == track.watts:
            return
        track.watts = watts
        name = f"power of {instance}"
        self._event({"ph": "C", "name": name, "pid": track.pid, "ts": at_ps / _PS_PER_US, "args": {"W": watts}})

    def _instant(self, instance: str, at_ps: int, name: str, detail: str) -> None:
        track = self._tracks[instance]
        place: Event = {"ph": "i", "s": "t", "pid": track.pid, "tid": track.tid, "ts": at_ps / _PS_PER_US}
        self._event({**place, "name": name, "args": {"detail": detail} if detail else {}})

    def _event(self, event: Event) -> None:
        self._file.write(self._separator + msgspec.json.encode(event))
        self._separator = b",\n"


def _title(run: IterationRun) -> str:
    parts = []
    if run.prefill_tokens:
        parts.append(f"prefill {run.prefill_tokens:,} tokens")
    if run.decode_sequences:
        parts.append(f"decode ×{run.decode_sequences:,}")
    iterations = f" ({run.iterations:,} iterations)" if run.iterations > 1 else ""
    return " + ".join(parts) + iterations
