"""The pipes of a process that is told what to do on its standard input, line by line, and reports on its output."""

import os
import sys
from collections.abc import Callable

import msgspec

from twofold.serving.reports import Order

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


class OrderPipe:
    """Orders from the standard input; its end is the order to end, and `ended` from then on."""

    def __init__(self) -> None:
        self.ended = False
        self._unread = b""

    def fileno(self) -> int:
        return sys.stdin.fileno()

    def read(self) -> list[Order]:
        """What has come: to be called when there is something, whole lines are orders."""
        said = os.read(self.fileno(), 1 << 16)
        self.ended = self.ended or not said
        *lines, self._unread = (self._unread + said).split(b"\n")
        return [msgspec.json.decode(line, type=Order) for line in lines]
