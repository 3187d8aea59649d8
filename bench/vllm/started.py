"""Processes of one measured system: log files, readiness checks and guaranteed termination."""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from twofold.errors import ConfigurationError

START_S, STOP_S = 600.0, 20.0
LAST_LINES = 25


class Processes:
    """Context manager that starts processes and ends them in reverse order on exit."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, process in reversed(self._started):
            with suppress(ProcessLookupError):
                process.terminate()
        for _, process in reversed(self._started):
            _end(process)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process that logs to `name`.log and receives SIGTERM when the calling process ends."""
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                process_group=0,  # a session of its own could starve the client on a shared core (sched_autogroup)
            )
        self._started.append((name, process))

    def wait(self, url: str) -> None:
        """Wait until `url` responds. Raises ConfigurationError after a timeout, or if a process ends."""
        deadline_s = time.monotonic() + START_S
        while not _answers(url):
            for name, process in self._started:
                if process.poll() is not None:
                    raise ConfigurationError(f"{name} ended while starting: {self.last_words(name)}")
            if time.monotonic() > deadline_s:
                raise ConfigurationError(f"no response at {url} after {START_S:.0f} s")
            time.sleep(0.5)

    def pid(self, name: str) -> int:
        """Return the process id of the process that logs to `name`.log."""
        return next(process.pid for given, process in self._started if given == name)

    def last_words(self, name: str) -> str:
        lines = self._log(name).read_text(errors="replace").splitlines()
        return "\n".join(["", *lines[-LAST_LINES:]])

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  (ours)
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the process and the rest of its group
    process.wait()
