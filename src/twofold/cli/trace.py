"""`twofold trace`: show, convert, rescale and generate traces."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import typer
from rich.console import Console, Group
from rich.table import Table

from twofold.cli import options
from twofold.cli.progress import trace_progress
from twofold.cli.settings import Flag, Settings, command, flag, group
from twofold.cli.workload import nonempty
from twofold.errors import ConfigurationError, require
from twofold.kvcache.eviction import EVICTIONS
from twofold.planning.capacity.replay import TraceReuse, trace_reuse
from twofold.reporting.output import json_text, table
from twofold.request import Request
from twofold.workload.format import TraceFormat
from twofold.workload.rescale import fit_lengths
from twofold.workload.rows import ReadNotes, require_file
from twofold.workload.source import Replay, generate
from twofold.workload.summary import LengthSummary, TraceSummary, summarise
from twofold.workload.trace import FORMATS, WRITABLE, detect_format, find_format, open_trace, write_trace

_CAPACITIES: Final = (1_000, 3_000, 10_000, 30_000, 100_000)  # blocks
_FORMATS: Final = ", ".join(FORMATS)
_HEADINGS: Final = ("", "min", "mean", "P50", "P90", "P99", "max", "total")

TARGET_FORMAT: Final = Flag(f"Format to write: {', '.join(WRITABLE)}; twofold loses nothing.")


class TraceSettings(Settings):
    """Flags that select the trace to read."""

    trace: Path = flag("Trace: csv or jsonl, plain or gzip.", ..., positional=True, metavar="TRACE")
    format: str | None = flag(f"Format of the trace: {_FORMATS}.", unset="detected")

    def open(self) -> tuple[str, Iterator[Request], ReadNotes]:
        """Open the trace. Return its format, its requests, and notes on corrections made while reading."""
        name, notes = self.format or detect_format(self.trace).name, ReadNotes()
        return name, trace_progress(open_trace(self.trace, name, notes)), notes


class ShowSettings(TraceSettings):
    """All flags of `twofold trace show`."""

    json: bool = options.JSON.field(False)


class ReuseSettings(TraceSettings):
    """All flags of `twofold trace reuse`."""

    capacity: tuple[int, ...] = flag("Capacity of the cache in blocks; repeatable.", (), unset="1,000 to 100,000")
    eviction: tuple[str, ...] = flag("Eviction policy; repeatable.", (), choices=EVICTIONS, unset="all")
    json: bool = options.JSON.field(False)


class ConvertSettings(TraceSettings):
    """All flags of `twofold trace convert`."""

    out: Path = flag("File to write; compressed if its name ends in .gz.", ..., positional=True, metavar="OUT")
    to: str | None = TARGET_FORMAT.field(unset="twofold")
    rate: float | None = options.RATE.field()
    rate_scale: float | None = flag("Factor on the rate of arrivals.")
    length_scale: float = options.LENGTH_SCALE.field(1.0)
    max_model_len: int | None = options.CLIP_LENGTH.field()
    start: float = options.START.field(0.0)
    duration: float | None = options.DURATION.field()
    num_requests: int | None = options.NUM_REQUESTS.field()


class GenerateSettings(Settings):
    """All flags of `twofold trace generate`."""

    name: str = flag(
        "Named workload such as azure-conv, or lengths as in 512+64.", ..., positional=True, metavar="NAME"
    )
    output: Path = flag("File to write; compressed if its name ends in .gz.", ..., metavar="FILE")
    rate: float = options.RATE.field(...)
    to: str | None = TARGET_FORMAT.field(unset="twofold")
    num_requests: int | None = options.NUM_REQUESTS.field()
    duration: float | None = options.DURATION.field()
    arrival: str | None = options.ARRIVAL.field(unset="poisson")
    burstiness: float = options.BURSTINESS.field(1.0)
    length_scale: float = options.LENGTH_SCALE.field(1.0)
    max_model_len: int | None = options.CLIP_LENGTH.field()
    seed: int = options.SEED.field(0)


@command
def show(settings: ShowSettings) -> None:
    """Show statistics of a trace: the number, arrivals, lengths and shared prefixes of its requests."""
    name, requests, notes = settings.open()
    summary = summarise(requests)
    if settings.json:
        _print_json(settings.trace, name, summary)
    else:
        Console().print(_trace_tables(f"{settings.trace} ({name})", summary))
    _mention(notes)


@command
def reuse(settings: ReuseSettings) -> None:
    """Show the prefix hit rate of a trace, by cache capacity and eviction policy."""
    capacities, path = settings.capacity or _CAPACITIES, settings.trace
    for capacity in capacities:
        require(capacity >= 1, f"--capacity {capacity} is out of range: give at least one block")
    name, requests, notes = settings.open()
    found = trace_reuse(requests, capacities, settings.eviction or tuple(EVICTIONS))
    if settings.json:
        _print_json(path, name, found)
    elif found.highest is None:
        raise ConfigurationError(f"{path} has no prefix blocks, so nothing can be reused")
    else:
        typer.echo(f"{path} ({name}): {found.blocks:,} prefix blocks, {found.distinct_blocks:,} distinct")
        typer.echo(f"Hit rate of an unlimited cache: {found.highest:.2%}")
        Console().print(_reuse_table(found))
    _mention(notes)


def _print_json(path: Path, name: str, found: TraceSummary | TraceReuse) -> None:
    facts = {"path": str(path), "format": name, **msgspec.to_builtins(found)}
    typer.echo(json_text(facts))


@command
def convert(settings: ConvertSettings) -> None:
    """Convert a trace to another format; select a part of the trace, or rescale it."""
    path, out = settings.trace, settings.out
    require_file(path)
    require(not _same(out, path), f"{out} is the input: name another file")
    name, notes = settings.format or detect_format(path).name, ReadNotes()
    part = Replay(
        start_s=settings.start,
        duration_s=settings.duration,
        num_requests=settings.num_requests,
        rate=settings.rate,
        rate_scale=settings.rate_scale,
    )
    requests = part.requests(lambda: trace_progress(open_trace(path, name, notes)))
    # Lengths are scaled, then clipped. Prefix blocks beyond a shortened prompt are dropped.
    _save(fit_lengths(requests, settings.length_scale, settings.max_model_len), out, settings.to)
    _mention(notes)


@command
def generate_trace(settings: GenerateSettings) -> None:
    """Generate a trace with the request lengths of a real service. The same flags and seed write the same bytes."""
    requests = generate(
        settings.name,
        rate=settings.rate,
        num_requests=settings.num_requests,
        duration_s=settings.duration,
        arrival=settings.arrival,
        burstiness=settings.burstiness,
        seed=settings.seed,
    )
    fitted = fit_lengths(requests, settings.length_scale, settings.max_model_len)
    _save(trace_progress(fitted), settings.output, settings.to)


def _save(requests: Iterable[Request], out: Path, to: str | None) -> None:
    """Write requests to a file, and list on stderr the fields that the format cannot store."""
    target = _target(out, to)
    some = nonempty(requests, "no request arrives in this part of the trace, so nothing is written")
    written = write_trace(some, out, target)
    for loss in written.losses(target):
        typer.echo(f"note: {loss}", err=True)
    typer.echo(f"wrote {written.requests:,} requests to {out} ({target.name})", err=True)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # a missing file fails later, with its own error
        return False


def _target(out: Path, to: str | None) -> TraceFormat:
    """Return the format of the output file, by default `twofold`."""
    if to is None and ".csv" in out.suffixes:
        names = [known.name for known in FORMATS.values() if known.suffix == ".csv"]
        raise ConfigurationError(f"{out}: give the format of the csv, --to {' or --to '.join(names)}")
    return find_format(to or "twofold")


def _mention(notes: ReadNotes) -> None:
    if notes.zero_outputs:
        typer.echo(f"note: {notes.zero_outputs:,} outputs of length 0 were read as 1", err=True)


def _trace_tables(title: str, summary: TraceSummary) -> Group:
    """Return two tables of a trace: one of counts and arrivals, and one of prompt and output lengths."""
    facts = table(title, ("", ""), (), _facts(summary).items(), show_header=False)
    rows = ("prompt", *_cells(summary.prompt_tokens)), ("output", *_cells(summary.output_tokens))
    return Group(facts, table("Lengths in tokens", _HEADINGS, range(1, len(_HEADINGS)), rows))


def _reuse_table(found: TraceReuse) -> Table:
    """Return a table of prefix hit rates, with a row for each cache capacity and a column for each eviction policy."""
    rates = {(cache.capacity, cache.eviction): cache.rate for cache in found.caches}
    evictions = dict.fromkeys(cache.eviction for cache in found.caches)
    rows = (
        (f"{capacity:,}", *(f"{rates[capacity, eviction]:.2%}" for eviction in evictions))
        for capacity in sorted({cache.capacity for cache in found.caches})
    )
    return table(None, ("Blocks", *evictions), range(len(evictions) + 1), rows)


def _facts(summary: TraceSummary) -> dict[str, str]:
    facts = {"Requests": f"{summary.requests:,}", "Duration": f"{summary.duration_s:,.1f} s"}
    if summary.requests_per_s is not None:
        facts["Rate"] = f"{summary.requests_per_s:,.3f} requests/s"
    if (cv := summary.gap_cv) is not None:
        kind = f"gamma arrivals of burstiness {cv**-2:.3g}" if cv > 0.001 else "constant"
        facts["CV of gaps"] = f"{cv:.3f} ({kind})"
    if summary.highest_reuse is not None:
        facts["Prefix blocks"] = f"{summary.prefix_blocks:,}, {summary.distinct_prefix_blocks:,} distinct"
        facts["Highest reuse"] = f"{summary.highest_reuse:.2%} of prefix blocks"
    return facts


def _cells(lengths: LengthSummary) -> list[str]:
    whole = (lengths.max, lengths.total)
    quantiles = (lengths.p50, lengths.p90, lengths.p99)
    return [
        f"{lengths.min:,}",
        f"{lengths.mean:,.1f}",
        *(f"{value:,.0f}" if value == round(value) else f"{value:,.1f}" for value in quantiles),
        *(f"{value:,}" for value in whole),
    ]


app = group(
    "Show, convert, rescale and generate traces of requests.",
    {"show": show, "convert": convert, "generate": generate_trace, "reuse": reuse},
)
