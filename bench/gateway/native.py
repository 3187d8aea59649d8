"""Compile and run the programs in C: the mock of a vLLM server, and the load generator."""

import shutil
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec

from twofold.errors import ConfigurationError

SOURCES = Path(__file__).parent
FLAGS = ("-O2", "-std=c11", "-Wall", "-Wextra")
MOCK, LOAD = "mock_server", "load"


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in ms."""

    p50: float
    p90: float
    p99: float


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and latencies of one load. `seconds` last until the last response; `error` is the first one."""

    sent: int
    unsent: int  # due, while all connections were busy until the end
    requests: int  # with a complete output
    errors: int
    tokens: int  # as the server reports them
    events: int  # of streams, with text
    seconds: float
    error: str
    ttfb_ms: Percentiles
    total_ms: Percentiles


def compile_programs(folder: Path) -> None:
    """Compile both programs into `folder`. Raises ConfigurationError without a C compiler, or if it fails."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ConfigurationError("the mock server and the load generator need a C compiler: install gcc")
    for name in (MOCK, LOAD):
        command = [compiler, *FLAGS, "-o", str(folder / name), str(SOURCES / f"{name}.c")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigurationError(f"{name}.c does not compile: {done.stderr.strip()}")


def on_cores(cores: Sequence[int], command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` on these cores."""
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


def offer(command: Sequence[str], timeout_s: float) -> LoadResult:
    """Run the load generator and return its result. Raises ConfigurationError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode:
        raise ConfigurationError(f"the load generator failed: {done.stderr.strip()}")
    return msgspec.json.decode(done.stdout, type=LoadResult)


def set_gap(url: str, gap_ms: float) -> None:
    """Set the time between two tokens of the later streams of a mock server."""
    request = urllib.request.Request(f"{url}/gap/{gap_ms:g}", method="POST")  # noqa: S310  (ours)
    with urllib.request.urlopen(request, timeout=10):  # noqa: S310
        pass
