"""A text file read line by line: numbered, decoded, unpacked where it is gzip, and never held whole."""

import gzip
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

from twofold.errors import WorkloadError

MAX_LINE_BYTES = (
    16 * 2**20
)  # no trace has such a line; without a bound one without line ends would fill memory
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(slots=True)
class ReadNotes:
    """What a reader changed in the latest reading: `zero_outputs` outputs of length 0 were read as 1."""

    zero_outputs: int = 0


class Lines:
    """The lines of one open file that are not blank; `number` is that of the latest, counted from 1."""

    def __init__(self, path: Path, stream: BufferedIOBase, notes: ReadNotes) -> None:
        self.path, self.notes, self.number = path, notes, 0
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        while raw := self._read():
            text = self._decode(raw).strip()
            if text:
                yield text

    def error(self, reason: str) -> WorkloadError:
        """An error about the latest line."""
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
    """Open a text file, plain or gzip; raises WorkloadError where there is none."""
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
    """Raise WorkloadError unless `path` is a regular file: a trace may be read twice, so no pipe will do."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise WorkloadError(str(path), "there is no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise WorkloadError(str(path), f"cannot be opened: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(mode):
        raise WorkloadError(str(path), "a trace is a regular file, and this is not one")
