"""A file that an observer streams to, and that has its name only once it is complete."""

import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from twofold.errors import ConfigurationError

_BUFFER: Final = 1 << 20


class WholeFile:
    """Bytes written beside `path` and moved there by `commit`; what is not committed leaves no trace.

    A device or a pipe at `path` is written to directly. Raises ConfigurationError wherever the place cannot be
    written to: when it is made, and later if a disk is full.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ConfigurationError(f"{self.path} is a directory: name a file in it")
        direct = self.path.exists() and not self.path.is_file()
        self._target = self.path.resolve()
        self._part = self._target if direct else _part(self._target)
        try:
            self._stream: IO[bytes] = self._part.open("wb", buffering=_BUFFER)
        except OSError as error:
            raise self._unwritable(error) from error
        # An observer of a broken run is dropped, not closed: this runs then, or else when the program ends.
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
        """Give the file its name; nothing can be written after that."""
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


def _part(target: Path) -> Path:
    return target.with_name(f".part-{os.getpid()}-{target.name}")


def _discard(stream: IO[bytes], part: Path | None) -> None:
    with suppress(OSError):  # it goes anyway
        stream.close()
    if part is not None:
        part.unlink(missing_ok=True)
