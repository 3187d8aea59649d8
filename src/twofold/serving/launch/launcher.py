"""The launcher: starts the process that starts the workers, follows its reports and leaves nothing behind."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator

import msgspec

from twofold.serving.config import ServiceConfig
from twofold.serving.launch.child_process import Report, WorkerCommand

TERMINATE_S = 5.0  # a nursery that is told to end gets this long


class Launcher:
    """Runs `module`, which reads the `job` first, in a session of its own (Ctrl-C reaches only us).

    Where its workers' hosts join the service, `joins` says so.
    """

    joins = False

    def __init__(self, module: str, job: msgspec.Struct) -> None:
        self._module, self._job = module, job
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process; it begins to report at once."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None  # noqa: S101  (asked for as a pipe above)
        self._process.stdin.write(msgspec.json.encode(self._job) + b"\n")
        await self._process.stdin.drain()

    def start_worker(self, instance: str) -> None:
        """A worker that has ended is to be started again."""
        self._order(WorkerCommand(start=instance))

    def kill_worker(self, instance: str) -> None:
        """A worker must not go on; its end will be reported."""
        self._order(WorkerCommand(kill=instance))

    def release_worker(self, instance: str) -> None:
        """A worker has ended and is not wanted now: what is kept for it may go."""
        self._order(WorkerCommand(free=instance))

    def _order(self, order: WorkerCommand) -> None:
        process = self._process
        if process is not None and process.stdin is not None and process.returncode is None:
            process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def reports(self) -> AsyncIterator[Report]:
        """What the process says, until it ends; one that dies without a word is reported as a failure."""
        assert self._process is not None  # noqa: S101  (reports are asked for after start)
        assert self._process.stdout is not None  # noqa: S101  (asked for as a pipe in start)
        told = False
        async for line in self._process.stdout:
            report = msgspec.json.decode(line, type=Report)
            told = told or report.failure is not None
            yield report
        code = await self._process.wait()
        if code not in {0, -signal.SIGTERM} and not told:
            yield Report(failure=f"the process that starts the workers ended with code {code}")

    async def stop(self, grace_s: float = 10.0) -> None:
        """Wait for workers that were told to end; end by force what is still there after `grace_s`."""
        if self._process is None:
            return
        self._order(WorkerCommand(finish=True))
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self._process.terminate()  # it then kills its workers and ends
            try:
                await asyncio.wait_for(self._process.wait(), TERMINATE_S)
            except TimeoutError:
                self._process.kill()  # its workers die with it
                await self._process.wait()


class LocalLauncher(Launcher):
    """Worker processes on this host, forked by a nursery."""

    def __init__(self, config: ServiceConfig) -> None:
        super().__init__("twofold.serving.launch.fork_server", config)
