"""Output files that appear under their names only when they are complete."""

import os
import weakref
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Final

from twofold.errors import ConfigurationError

_BUFFER: Final = 1 << 20


class AtomicFile(AbstractContextManager["AtomicFile"]):
    """Output file that appears at `path` only after `commit`, or at the end of a `with` statement without an exception.
    Raise ConfigurationError if it is not writable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            if self.path.is_dir():
                raise ConfigurationError(f"{self.path} is a directory: name a file in it")
            # Devices and pipes have no temporary file. /dev/stdout may be a file to which others write, too.
            direct = self.path.is_relative_to("/dev") or (self.path.exists() and not self.path.is_file())
            self._target = self.path.resolve()
            self._part = self._target if direct else self._target.with_name(f".part-{os.getpid()}-{self._target.name}")
            self._stream: IO[bytes] = self._part.open("ab" if direct else "wb", buffering=_BUFFER)
        except OSError as error:
            raise self._unwritable(error) from error
        # Observers of a failed run are not closed: the file is deleted when they are garbage-collected, or at exit.
        self._discard = weakref.finalize(self, _discard, self._stream, None if direct else self._part)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self._discard()

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def write(self, data: bytes) -> None:
        try:
            self._stream.write(data)
        except OSError as error:
            raise self._unwritable(error) from error

    def flush(self) -> None:
        self._stream.flush()

    def save(self, text: str) -> None:
        """Write `text`, which is all of the file, and commit it."""
        self.write(text.encode())
        self.commit()

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
