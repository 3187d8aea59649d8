"""Trace files of any supported format: detection, streaming reads and atomic writes."""

import gzip
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.atomic_file import AtomicFile
from twofold.errors import ConfigurationError, WorkloadError, require
from twofold.request import Request
from twofold.workload.aiperf import AIPERF, TEXT_KEYS
from twofold.workload.azure import AZURE
from twofold.workload.format import TraceFormat
from twofold.workload.mooncake import MOONCAKE
from twofold.workload.native import TWOFOLD
from twofold.workload.rows import ReadNotes, csv_fields, json_keys, open_lines, require_file
from twofold.workload.splitwise import SPLITWISE

FORMATS: dict[str, TraceFormat] = {
    "aiperf": AIPERF,  # before mooncake: its lines may have the keys of both
    "azure": AZURE,
    "mooncake": MOONCAKE,
    "splitwise": SPLITWISE,
    "twofold": TWOFOLD,
}
WRITABLE: Final = tuple(name for name, known in FORMATS.items() if known.encode is not None)


def open_trace(path: str | Path, format_name: str | None = None, notes: ReadNotes | None = None) -> Iterator[Request]:
    """Return an iterator over the requests of a trace file. If `format_name` is None, detect the format.

    Outputs of length 0 are read as length 1, and counted in `notes`. Raises WorkloadError for a missing file or
    an invalid line, and ConfigurationError for an unknown format.
    """
    file = Path(path)
    require_file(file)
    chosen = detect_format(file) if format_name is None else find_format(format_name)
    return _read(file, chosen, notes or ReadNotes())


def find_format(name: str) -> TraceFormat:
    """Look up a trace format by name. Raises ConfigurationError for an unknown name."""
    require(name in FORMATS, f"trace format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]


def detect_format(path: str | Path) -> TraceFormat:
    """Detect the format of a trace from its first line. Raises WorkloadError if no format matches."""
    with open_lines(Path(path)) as lines:
        line = next(iter(lines), None)
        if line is None:
            raise WorkloadError(str(path), "the file is empty")
        is_json = line.startswith(("{", "["))
        found = json_keys(lines, line) if is_json else csv_fields(lines, line)
        for candidate in FORMATS.values():
            if set(candidate.keys) <= set(found):
                return candidate
        if is_json and (texts := sorted(TEXT_KEYS & set(found))):
            raise lines.error(
                f"{texts[0]} has no length in tokens: AIPerf files are read if each line has {', '.join(AIPERF.keys)}"
            )
        raise lines.error(_mismatch(set(found), "key" if is_json else "column"))


def _mismatch(found: set[str], noun: str) -> str:
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
                raise lines.error(f"arrives {early:g} s before the request above it; arrivals must be in order")
            latest = request.arrival_s
            yield request
    if latest is None:
        raise WorkloadError(str(path), "the trace has no requests")


@dataclass(slots=True)
class WriteResult:
    """Number of requests written to a trace file, and numbers of requests that lost information.

    Lost ids, prefix blocks and sessions, and rounded arrival times, are counted separately.
    """

    requests: int = 0
    lost_ids: int = 0
    lost_prefix_blocks: int = 0
    lost_turns: int = 0
    rounded: int = 0

    def losses(self, target: TraceFormat) -> list[str]:
        """Return a sentence for each kind of information that the trace format could not store."""
        step_ms = target.resolution_s * 1e3
        sentences = {
            f"no prefix blocks: {self.lost_prefix_blocks:,} requests lost theirs": self.lost_prefix_blocks,
            f"no sessions: {self.lost_turns:,} requests lost theirs": self.lost_turns,
            f"no request ids: {self.lost_ids:,} became row numbers": self.lost_ids,
            f"times in steps of {step_ms:g} ms: {self.rounded:,} were rounded": self.rounded,
        }
        return [f"the {target.name} format has {loss}" for loss, count in sentences.items() if count]


def write_trace(requests: Iterable[Request], path: str | Path, target: TraceFormat) -> WriteResult:
    """Write requests to `path`, compressed if its name ends in .gz. The file is replaced only on success.

    Raises ConfigurationError if the path is not writable or the format cannot represent a request.
    """
    if target.encode is None:
        raise ConfigurationError(f"the {target.name} format is only read: write {' or '.join(WRITABLE)} instead")
    written = WriteResult()
    with AtomicFile(path) as whole, _compressed(whole) as file:
        if target.header is not None:
            file.write(f"{target.header}\n".encode())
        for index, request in enumerate(requests):
            file.write(f"{target.encode(index, request)}\n".encode())
            _count(written, index, request, target)
    return written


def _count(written: WriteResult, index: int, request: Request, target: TraceFormat) -> None:
    written.requests += 1
    written.lost_ids += not target.keeps_ids and request.id != str(index)
    written.lost_prefix_blocks += not target.keeps_prefix_blocks and bool(request.prefix_blocks)
    written.lost_turns += not target.keeps_sessions and bool(request.session)
    if target.resolution_s:
        steps = request.arrival_s / target.resolution_s
        # Tolerance of a thousandth of a step for float error.
        written.rounded += abs(steps - round(steps)) > 1e-3


def _compressed(file: AtomicFile) -> AbstractContextManager[AtomicFile | gzip.GzipFile]:
    """Return the file, or a stream that compresses to it if its name ends in .gz."""
    if file.path.suffix != ".gz":
        return nullcontext(file)
    # No file name and time in the header, so equal requests give equal bytes.
    return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
