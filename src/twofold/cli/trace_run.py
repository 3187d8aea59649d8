"""What the commands of `twofold trace` do; apart from their flags because its imports are slow."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from twofold.cli.trace_progress import watched
from twofold.cli.trace_table import reuse_table, trace_tables
from twofold.errors import ConfigurationError
from twofold.kvcache.eviction import EVICTIONS
from twofold.planning.capacity.replay import trace_reuse
from twofold.request import Request
from twofold.workload.format import TraceFormat
from twofold.workload.rescale import fit_lengths
from twofold.workload.rows import ReadNotes, require_file
from twofold.workload.source import Replay
from twofold.workload.summary import summarise
from twofold.workload.trace import FORMATS, detect_format, find_format, open_trace, write_trace

_CAPACITIES = (
    1_000,
    3_000,
    10_000,
    30_000,
    100_000,
)  # blocks; at 512 tokens each, half a million tokens and more


def show_trace(path: Path, format_name: str | None, *, as_json: bool) -> None:
    """Print the summary of a trace, as tables or as JSON."""
    name = format_name or detect_format(path).name
    notes = ReadNotes()
    summary = summarise(watched(open_trace(path, name, notes)))
    if as_json:
        facts = {"path": str(path), "format": name, **msgspec.to_builtins(summary)}
        typer.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2))
    else:
        Console().print(trace_tables(f"{path} ({name})", summary))
    _mention(notes)


def show_reuse(
    path: Path,
    format_name: str | None,
    capacities: Sequence[int] | None,
    evictions: Sequence[str] | None,
    *,
    as_json: bool,
) -> None:
    """Print what caches would have hit over a trace, as a table or as JSON."""
    capacities = capacities or _CAPACITIES
    for capacity in capacities:
        if capacity < 1:
            raise ConfigurationError(f"--capacity is {capacity}, and a cache has room for at least one block")
    name = format_name or detect_format(path).name
    notes = ReadNotes()
    found = trace_reuse(watched(open_trace(path, name, notes)), capacities, evictions or tuple(EVICTIONS))
    if as_json:
        facts = {"path": str(path), "format": name, **msgspec.to_builtins(found)}
        typer.echo(msgspec.json.format(msgspec.json.encode(facts), indent=2))
    elif found.highest is None:
        raise ConfigurationError(f"{path} names no prefix blocks, so nothing can be said of their reuse")
    else:
        typer.echo(f"{path} ({name}): {found.blocks:,} prefix blocks, {found.distinct_blocks:,} distinct")
        typer.echo(f"An endless cache would hit {found.highest:.2%} of them.")
        Console().print(reuse_table(found))
    _mention(notes)


def convert_trace(
    path: Path,
    out: Path,
    *,
    format_name: str | None,
    to: str | None,
    part: Replay,
    length_scale: float,
    max_model_len: int | None,
) -> None:
    """Write `part` of the trace at `path`, its lengths scaled and clipped, to `out`."""
    require_file(path)
    if _same(out, path):
        raise ConfigurationError(f"{out} is the trace that is read: give the result another name")
    name = format_name or detect_format(path).name
    notes = ReadNotes()
    requests = part.requests(lambda: watched(open_trace(path, name, notes)))
    _save(fit_lengths(requests, length_scale, max_model_len), out, to)
    _mention(notes)


def generate_trace(
    requests: Iterable[Request], out: Path, *, to: str | None, length_scale: float, max_model_len: int | None
) -> None:
    """Write generated requests, their lengths scaled and clipped, to `out`."""
    _save(watched(fit_lengths(requests, length_scale, max_model_len)), out, to)


def _save(requests: Iterable[Request], out: Path, to: str | None) -> None:
    """Write requests, and say on stderr what was written and what was lost."""
    target = _target(out, to)
    written = write_trace(_at_least_one(requests), out, target)
    for loss in written.losses(target):
        typer.echo(f"note: {loss}", err=True)
    typer.echo(f"wrote {written.requests:,} requests to {out} ({target.name})", err=True)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there, and reading or writing it says why where that matters
        return False


def _target(out: Path, to: str | None) -> TraceFormat:
    """The format to write; a name that promises csv must not be given jsonl by default."""
    if to is None and ".csv" in out.suffixes:
        names = [known.name for known in FORMATS.values() if known.suffix == ".csv"]
        raise ConfigurationError(f"{out}: say which csv to write, --to {' or --to '.join(names)}")
    return find_format(to or "twofold")


def _at_least_one(requests: Iterable[Request]) -> Iterator[Request]:
    empty = True
    for request in requests:
        empty = False
        yield request
    if empty:
        raise ConfigurationError("no request arrives in the part that was asked for, so nothing was written")


def _mention(notes: ReadNotes) -> None:
    if notes.zero_outputs:
        typer.echo(f"note: {notes.zero_outputs:,} outputs of length 0 were read as 1", err=True)
