"""Run `twofold serve` as a child process for demonstrations and benchmarks."""

import errno
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from twofold.errors import ConfigurationError

START_S = 600.0
STOP_S = 60.0
_PORTS = range(12_000, 32_768)
# Processes that were forked or seeded alike must draw different ports.
_RANDOM = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class ServedProcess:
    """A running, ready service: its base URL, and the pid of the process with gateway and controller."""

    url: str
    pid: int


@contextmanager
def served(model: Path | None, flags: Sequence[str]) -> Iterator[str]:
    """Run `twofold serve` inside a `with` statement. Yield the URL of the service."""
    with served_process(model, flags) as process:
        yield process.url


@contextmanager
def served_process(model: Path | None, flags: Sequence[str]) -> Iterator[ServedProcess]:
    """Run `twofold serve MODEL FLAGS…` on a free port inside a `with` statement.

    Raises ConfigurationError with the service's log if the service ends during startup.
    """
    port = free_port()
    what = [] if model is None else [str(model)]  # without a model, the flags select an emulated engine
    command = [sys.executable, "-m", "twofold.cli.main", "serve", *what, "--port", str(port), *flags]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)  # noqa: S603 (ours)
        try:
            if not wait_ready(process, url):
                log.seek(0)
                raise ConfigurationError(f"the service ended while starting: {log.read().strip()}")
            yield ServedProcess(url, process.pid)
        finally:
            stop(process)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that is unused on `address`, an IPv4 or IPv6 address of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        # Linux assigns no port of this range automatically, so no other socket gets it before the caller binds it.
        port = _RANDOM.choice(_PORTS)
        with socket.socket(family) as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def metrics(url: str) -> str:
    """Fetch the Prometheus metrics of the service at `url`, as text."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:  # noqa: S310 (our own http URL)
        return str(response.read().decode())


def wait_ready(process: "subprocess.Popen[str] | subprocess.Popen[bytes]", url: str) -> bool:
    """Return True when the service is healthy, False if its process ends. Raises ConfigurationError after a timeout."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        if _healthy(url):
            return True
        time.sleep(0.2)
    raise ConfigurationError(f"the service was not ready within {START_S:.0f} s")


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:  # noqa: S310 (our own http URL)
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stop(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Send SIGINT to the process, and kill it if it does not end in time."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
