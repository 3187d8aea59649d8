"""Processes that end with the one that started them, however that happens.

What the nursery, or who else starts workers, tells the launcher, and is told: one JSON object a line each way.

The pipes of a process that is told what to do on its standard input, line by line, and reports on its output.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

import msgspec

_PR_SET_PDEATHSIG = 1


def die_with_parent(with_signal: signal.Signals, parent: int) -> None:
    """Let this process get a signal when the one with the id `parent`, which started it, dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event: a `stage` begins; a `failure` in one sentence; a worker `exited`, and `why` if that is known; facts of
    the model; the workers that are `waiting` for room, of those that should run.

    `max_model_len` (tokens), `vocab_size` and the `model` that it serves come with the stage "starting workers".
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
    """`start` a worker that has ended, `kill` one that must not go on, `free` what is kept for one that has ended and
    is not wanted now, or `finish` with the last."""

    start: str | None = None
    kill: str | None = None
    free: str | None = None
    finish: bool = False


Say = Callable[[bytes], None]


def take_stdout() -> Say:
    """Writes lines to the standard output; whatever else is printed, here or in a child, goes to stderr."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(line: bytes) -> None:
        pipe.write(line + b"\n")

    return say


def read_line(fd: int) -> bytes:
    """One line, and nothing of what comes after it: a buffer would hide orders from a selector."""
    line = bytearray()
    while not line.endswith(b"\n") and (char := os.read(fd, 1)):
        line += char
    return bytes(line)


class CommandPipe:
    """Orders from the standard input; its end is the order to end, and `ended` from then on."""

    def __init__(self) -> None:
        self.ended = False
        self._unread = b""

    def fileno(self) -> int:
        return sys.stdin.fileno()

    def read(self) -> list[WorkerCommand]:
        """What has come: to be called when there is something, whole lines are orders."""
        said = os.read(self.fileno(), 1 << 16)
        self.ended = self.ended or not said
        *lines, self._unread = (self._unread + said).split(b"\n")
        return [msgspec.json.decode(line, type=WorkerCommand) for line in lines]
