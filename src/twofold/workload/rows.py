"""Reading of csv and jsonl files, plain or compressed with gzip."""

import csv
import gzip
import math
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import TypeVar

import msgspec

from twofold.errors import WorkloadError
from twofold.hardware.suggestions import explain_validation

MAX_LINE_BYTES = 16 * 2**20  # bounds memory for files without line ends
MAX_BLANK_BYTES = 2**20  # bounds the time for compressed blank lines, of which a kilobyte may hold a megabyte
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(slots=True)
class ReadNotes:
    """Corrections made while reading a trace. `zero_outputs` counts outputs of length 0, which are read as length 1."""

    zero_outputs: int = 0


class Lines:
    """Iterator over the non-blank lines of an open file. `number` is the current line number."""

    def __init__(self, path: Path, stream: BufferedIOBase, notes: ReadNotes) -> None:
        self.path, self.notes, self.number = path, notes, 0
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        blank_bytes = 0
        while raw := self._read():
            text = self._decode(raw).strip()
            if text:
                blank_bytes = 0
                yield text
                continue
            blank_bytes += len(raw)
            if blank_bytes > MAX_BLANK_BYTES:
                raise self.error(f"more than {MAX_BLANK_BYTES:,} bytes of blank lines: this is not a trace")

    def error(self, reason: str) -> WorkloadError:
        """Create an error that names the file and the current line."""
        return WorkloadError(str(self.path), reason, self.number)

    def _read(self) -> bytes:
        self.number += 1
        try:
            raw = self._stream.readline(MAX_LINE_BYTES)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise self.error("the gzip data is damaged or cut off here") from error
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from error
        if len(raw) == MAX_LINE_BYTES:
            raise self.error(f"the line is longer than {MAX_LINE_BYTES:,} bytes: this is not a trace")
        return raw

    def _decode(self, raw: bytes) -> str:
        if b"\0" in raw:
            raise self.error("this is a binary file, not a trace in csv or jsonl")
        try:
            return raw.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise self.error("this is not UTF-8 text; a trace is csv or jsonl, plain or gzip") from error


@contextmanager
def open_lines(path: Path, notes: ReadNotes | None = None) -> Iterator[Lines]:
    """Open a text file, plain or gzip. Raises WorkloadError if it cannot be opened."""
    require_file(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise WorkloadError(str(path), f"cannot be opened: {error.strerror}") from error
    with file:
        if not file.peek(2).startswith(GZIP_MAGIC):
            yield Lines(path, file, notes or ReadNotes())
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield Lines(path, unpacked, notes or ReadNotes())


def require_file(path: Path) -> None:
    """Raise WorkloadError unless `path` is a regular file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise WorkloadError(str(path), "no such file") from error
    except (OSError, ValueError) as error:  # ValueError: invalid file name
        raise WorkloadError(str(path), f"cannot be opened: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(mode):  # a pipe cannot be read twice
        raise WorkloadError(str(path), "not a regular file")


_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")


def csv_fields(lines: Lines, line: str) -> list[str]:
    """Split one csv line into fields. Raises WorkloadError for invalid csv."""
    try:
        return [field.strip() for field in next(csv.reader((line,), strict=True))]
    except csv.Error as error:
        raise lines.error(f"not a csv line: {error}") from error


def csv_rows(lines: Lines, columns: Sequence[str]) -> Iterator[list[str]]:
    """Yield the values of `columns` for each row, in the order of `columns`."""
    texts = iter(lines)
    header = csv_fields(lines, next(texts, ""))
    missing = [column for column in columns if column not in header]
    if missing:
        raise lines.error(f"missing column {', '.join(missing)} (the header has {', '.join(header)})")
    places = [header.index(column) for column in columns]
    for text in texts:
        fields = csv_fields(lines, text)
        if len(fields) != len(header):
            raise lines.error(f"{len(fields)} columns where the header has {len(header)}")
        yield [fields[place] for place in places]


def parse_int(lines: Lines, column: str, text: str) -> int:
    """Parse a decimal integer. Raises WorkloadError for any other text."""
    if _WHOLE.fullmatch(text) is None:
        raise lines.error(f"{column} is {text!r}, which is not a whole number")
    return int(text)


def parse_seconds(lines: Lines, column: str, text: str) -> float:
    """Parse a time of at least 0 seconds. Raises WorkloadError for any other text."""
    try:
        value = float(text)
    except ValueError:
        raise lines.error(f"{column} is {text!r}, which is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise lines.error(f"{column} is {text!r}, which is not a time in seconds from 0 on")
    return value


T = TypeVar("T", bound=msgspec.Struct)


def json_rows(lines: Lines, kind: type[T]) -> Iterator[T]:
    """Decode each line as a struct of type `kind`. Raises WorkloadError for an invalid line."""
    decoder = msgspec.json.Decoder(kind)
    for line in lines:
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise lines.error(_json_error(error)) from error
        except RecursionError as error:
            raise lines.error("the JSON is nested too deeply for a trace") from error


def json_keys(lines: Lines, line: str) -> tuple[str, ...]:
    """Return the keys of the JSON object on a line."""
    try:
        return tuple(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError as error:
        raise lines.error(_json_error(error)) from error


def _json_error(error: msgspec.DecodeError) -> str:
    """Return the reason for a msgspec error as a message for users."""
    if isinstance(error, msgspec.ValidationError):
        return ": ".join(filter(None, explain_validation(error, "object")))
    message = str(error).removeprefix("JSON is malformed: ")
    return "the JSON is cut off" if "truncated" in message else f"not valid JSON: {message}"
