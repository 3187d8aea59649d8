"""Traces of any known format: which one a file has, and its requests as a stream."""

from collections.abc import Iterator
from pathlib import Path

from twofold.errors import ConfigurationError, WorkloadError
from twofold.request import Request
from twofold.workload.azure import AZURE
from twofold.workload.csv_rows import csv_fields
from twofold.workload.format import TraceFormat
from twofold.workload.json_rows import json_keys
from twofold.workload.lines import ReadNotes, open_lines, require_file
from twofold.workload.mooncake import MOONCAKE
from twofold.workload.native import TWOFOLD
from twofold.workload.splitwise import SPLITWISE

FORMATS: dict[str, TraceFormat] = {
    "azure": AZURE,
    "mooncake": MOONCAKE,
    "splitwise": SPLITWISE,
    "twofold": TWOFOLD,
}


def open_trace(
    path: str | Path, format_name: str | None = None, notes: ReadNotes | None = None
) -> Iterator[Request]:
    """The requests of a trace, one at a time; memory does not grow with the file.

    The file is looked at now (a missing one raises here) and read as the iterator is. `format_name` is one of
    `FORMATS`, found from the content if None. `notes` learns what the reader changed. Raises WorkloadError
    with file, line and reason at the first bad line, and ConfigurationError for an unknown format.
    """
    file = Path(path)
    require_file(file)
    chosen = detect_format(file) if format_name is None else find_format(format_name)
    return _read(file, chosen, notes or ReadNotes())


def find_format(name: str) -> TraceFormat:
    """The format of that name; raises ConfigurationError where there is none."""
    if name not in FORMATS:
        raise ConfigurationError(f"trace format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]


def detect_format(path: str | Path) -> TraceFormat:
    """The format of a file by its header or by the keys of its first object; raises WorkloadError."""
    with open_lines(Path(path)) as lines:
        line = next(iter(lines), None)
        if line is None:
            raise WorkloadError(str(path), "the file is empty")
        is_json = line.startswith(("{", "["))
        found = json_keys(lines, line) if is_json else csv_fields(lines, line)
        for candidate in FORMATS.values():
            if set(candidate.keys) <= set(found):
                return candidate
        raise lines.error(_unknown(set(found), "key" if is_json else "column"))


def _unknown(found: set[str], noun: str) -> str:
    """Why no format fits: what the nearest one misses, or all there are where none is near."""
    nearest = max(FORMATS.values(), key=lambda candidate: len(found & set(candidate.keys)))
    missing = [key for key in nearest.keys if key not in found]
    if len(missing) < len(nearest.keys):
        return f"missing {noun} {', '.join(missing)} (it looks like the {nearest.name} format)"
    known = "; ".join(f"{known.name}: {', '.join(known.keys)}" for known in FORMATS.values())
    return f"no known trace format begins like this ({known})"


def _read(path: Path, chosen: TraceFormat, notes: ReadNotes) -> Iterator[Request]:
    notes.zero_outputs = 0
    latest: float | None = None
    with open_lines(path, notes) as lines:
        for request in chosen.read(lines):
            early = 0.0 if latest is None else latest - request.arrival_s
            if early > 0:
                raise lines.error(
                    f"arrives {early:g} s before the request above it; arrivals must be in order"
                )
            latest = request.arrival_s
            yield request
    if latest is None:
        raise WorkloadError(str(path), "the trace holds no request")
