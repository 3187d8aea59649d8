"""The files of a simulation: which were asked for, and what writes them."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from twofold.errors import ConfigurationError
from twofold.simulation.observers.base import Observer
from twofold.simulation.observers.chrome_trace import ChromeTrace
from twofold.simulation.observers.files import AtomicFile, EventLog, ParquetTable


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """Where to write what besides the tables; None for what nobody asked for."""

    html: Path | None = None
    requests_table: Path | None = None
    chrome_trace: Path | None = None
    event_log: Path | None = None

    def open(self) -> tuple[list[Observer], AtomicFile | None]:
        """Observers that write, and the file for the page; what cannot be written is refused before the run.

        A file has its name once it is complete: an error or Ctrl-C leaves what was there.
        """
        self._require_distinct()
        writers: list[Observer] = []
        if self.requests_table is not None:
            writers.append(ParquetTable(self.requests_table))
        if self.chrome_trace is not None:
            writers.append(ChromeTrace(self.chrome_trace))
        if self.event_log is not None:
            writers.append(EventLog(self.event_log))
        return writers, None if self.html is None else AtomicFile(self.html)

    def require_apart(self, inputs: Iterable[str | Path]) -> None:
        """Raise ConfigurationError where a file to write is one that is read."""
        read = {Path(path).resolve() for path in inputs}
        for name in self.__struct_fields__:
            path = getattr(self, name)
            if path is not None and path.resolve() in read:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigurationError(f"{flag} {path} is a file that is read: name another")

    def _require_distinct(self) -> None:
        flags: dict[Path, str] = {}
        for name in self.__struct_fields__:
            flag, path = f"--{name.replace('_', '-')}", getattr(self, name)
            other = flag if path is None else flags.setdefault(path.resolve(), flag)
            if other != flag:
                raise ConfigurationError(f"{other} and {flag} both ask for {path}: name two files")
