"""Faults that the user's commands cause, and the time for which clients then wait."""

import asyncio
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from twofold.errors import require
from twofold.torture.streams import TortureStream

_NAMED = re.compile(r"(?P<name>[\w.-]+)=(?P<command>.*)", re.DOTALL)


class KillCommand(msgspec.Struct, frozen=True):
    """Shell command that causes a fault, and the name of its kind of fault."""

    name: str
    command: str


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a command, and the longest wait for a token after its start."""

    name: str
    at_s: float  # since the start of the load
    seconds: float  # until the command had ended
    error: str | None = None
    longest_wait_s: float | None = None  # None if no client waited for a token


def parse_kill(text: str) -> KillCommand:
    """Parse `NAME=COMMAND` or `COMMAND`. Raises ConfigurationError if there is no command."""
    named = _NAMED.fullmatch(text.strip())
    command = named["command"].strip() if named else text.strip()
    require(bool(command), f"--kill {text!r} has no command: write it as in decode='kill -9 4711'")
    return KillCommand(named["name"] if named else command, command)


async def inject(kill: KillCommand, limit_s: float) -> InjectedFault:
    """Run a command and wait for its end; after `limit_s` it is killed. A failure is in the returned fault."""
    at_s, error = time.monotonic(), None
    # A file, because servers that the command starts may keep its stderr open. A session of its own keeps the
    # terminal's Ctrl-C from them.
    with tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_shell(
            kill.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limit_s):
                code = await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            error = f"not finished after {limit_s:g} s"
        else:
            if code:
                stderr.seek(0)
                lines = stderr.read().decode(errors="replace").split("\n")
                error = f"exit status {code} {' '.join(lines).strip()[:200]}".strip()
    return InjectedFault(name=kill.name, at_s=at_s, seconds=time.monotonic() - at_s, error=error)


def longest_wait(streams: Iterable[TortureStream], begin_s: float, end_s: float) -> float | None:
    """Return the longest wait for a token after `begin_s` that begins before `end_s`, or None."""
    waits = (wait for stream in streams for wait in stream.waits())
    after = (last - max(first, begin_s) for first, last in waits if first < end_s and last > begin_s)
    return max(after, default=None)
