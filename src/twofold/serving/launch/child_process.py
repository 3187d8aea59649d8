"""Processes started by a launcher: commands arrive on standard input, reports leave on standard output, as JSON
lines.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

import msgspec

_PR_SET_PDEATHSIG = 1

Say = Callable[[bytes], None]


def die_with_parent(with_signal: signal.Signals, parent: int) -> None:
    """Deliver `with_signal` to this process when its parent process, with the id `parent`, dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of the process that starts workers.

    It reports a `stage` of start-up, a `failure` that ends the process, a worker that `exited` with a `code` and
    sometimes a reason `why`, or the workers `waiting` for room. The stage "starting workers" carries the model's facts:
    `max_model_len` in tokens, `vocab_size`, and the fingerprint `model`.
    """

    stage: str | None = None
    failure: str | None = None
    exited: str | None = None
    code: int | None = None
    why: str | None = None
    waiting: tuple[str, ...] | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    model: str | None = None


class WorkerCommand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Command to `start` an ended worker, `kill` a running one, `free` the resources of a retired one, or `finish` when
    all workers have ended.
    """

    start: str | None = None
    kill: str | None = None
    free: str | None = None
    finish: bool = False


def take_stdout() -> Say:
    """Return a function that writes lines to standard output; other output of this process is redirected to stderr."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(line: bytes) -> None:
        pipe.write(line + b"\n")

    return say


def read_line(fd: int) -> bytes:
    """Read one line unbuffered: a buffer would hide later commands from a selector."""
    line = bytearray()
    while not line.endswith(b"\n") and (char := os.read(fd, 1)):
        line += char
    return bytes(line)


class CommandPipe:
    """Commands on standard input; `ended` is set at end of file, which means: exit."""

    def __init__(self) -> None:
        self.ended = False
        self._unread = b""

    def fileno(self) -> int:
        return sys.stdin.fileno()

    def read(self) -> list[WorkerCommand]:
        """Return the complete commands after the descriptor became readable."""
        data = os.read(self.fileno(), 1 << 16)
        self.ended = self.ended or not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [msgspec.json.decode(line, type=WorkerCommand) for line in lines]
