"""Base of the fork server and the Ray driver. Both start workers for a launcher, and exchange JSON lines with it."""

import ctypes
import os
import selectors
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import msgspec

from twofold.serving.launch.model_source import ModelFacts

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with_parent(with_signal: signal.Signals, parent: int) -> None:
    """Ask the kernel to send `with_signal` to this process when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def set_title(name: str) -> None:
    """Set the name of this process in `ps` and `top`, of at most 15 bytes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Report to the launcher about one event, such as the exit of a worker."""

    stage: str | None = None
    facts: ModelFacts | None = None
    failure: str | None = None
    exited: str | None = None
    code: int | None = None
    why: str | None = None
    waiting: tuple[str, ...] | None = None


class WorkerCommand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Command to a launcher's child process: start or kill a worker, free its Ray resources, or exit after the last."""

    start: str | None = None
    kill: str | None = None
    free: str | None = None
    finish: bool = False


Job = TypeVar("Job")
SendReport = Callable[[Report], None]
_decoder = msgspec.json.Decoder(WorkerCommand)


def take_stdout() -> Callable[[bytes], None]:
    """Redirect standard output to standard error; return a function that writes lines to the original output."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(line: bytes) -> None:
        pipe.write(line + b"\n")

    return say


def begin(job: type[Job]) -> tuple[Job, SendReport]:
    """Read this process's job from stdin; return it, and a function that sends reports to the launcher."""
    die_with_parent(signal.SIGTERM, os.getppid())
    say = take_stdout()
    line = bytearray()
    # Unbuffered: a buffer would hide later commands from a selector.
    while not line.endswith(b"\n") and (char := os.read(sys.stdin.fileno(), 1)):
        line += char
    return msgspec.json.decode(line, type=job), lambda report: say(msgspec.json.encode(report))


class WorkerStarter(ABC):
    """Base class of a process that starts workers for a launcher and executes the launcher's commands."""

    poll_s: float  # longest time between two polls

    def __init__(self, report: SendReport) -> None:
        self._report = report
        self._ending = self._finishing = False
        self._unread = b""

    @abstractmethod
    def execute(self, command: WorkerCommand) -> None:
        """Execute a command of the launcher."""

    @abstractmethod
    def poll(self) -> bool:
        """Report the workers that have exited; return whether any workers still run."""

    @abstractmethod
    def kill_all(self) -> None: ...

    def watch(self) -> None:
        """Run commands until all workers have ended after `finish`; kill them if the launcher dies or sends SIGTERM."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGTERM, self._end)  # set now, because connecting to Ray has replaced the handler
        with selectors.DefaultSelector() as selector:
            for fd in (wake_read, sys.stdin.fileno()):
                selector.register(fd, selectors.EVENT_READ)
            while self._left():
                for key, _ in selector.select(timeout=self.poll_s):
                    if key.fd == wake_read:
                        os.read(wake_read, 4096)
                    else:
                        self._read_commands()
        self.kill_all()

    def _left(self) -> bool:
        left = self.poll()
        return not self._ending and (left or not self._finishing)

    def _end(self, _signal: int, _frame: object) -> None:
        self._ending = True

    def _read_commands(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        self._ending = self._ending or not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for command in map(_decoder.decode, lines):
            self._finishing = self._finishing or command.finish
            self.execute(command)
