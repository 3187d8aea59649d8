"""Base class of launchers, and the launcher of workers on this host."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec

from twofold.serving.config import ServiceConfig
from twofold.serving.controller.registry import ProcessControl
from twofold.serving.launch.child_process import Report, WorkerCommand

TERMINATE_S = 5.0  # from SIGTERM to SIGKILL


class Launcher(ProcessControl):
    """Starts and kills workers through a child process, which runs the module `module` with the input `job`."""

    joins = False  # whether workers join the service over the network

    def __init__(self, module: str, job: msgspec.Struct) -> None:
        self._module, self._job = module, job
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the child process."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A process group of its own keeps Ctrl-C from the child. With a session of its own, workers could starve
            # the gateway for seconds on a shared core, because Linux schedules sessions as groups (sched_autogroup).
            preexec_fn=os.setpgrp,
        )
        assert self._process.stdin is not None  # noqa: S101  (a pipe)
        self._process.stdin.write(msgspec.json.encode(self._job) + b"\n")
        await self._process.stdin.drain()

    def start_worker(self, instance: str) -> None:
        self._send(WorkerCommand(start=instance))

    def kill_worker(self, instance: str) -> None:
        """Tell the launcher's child process, which manages the workers, to kill the worker `instance`."""
        self._send(WorkerCommand(kill=instance))

    def release_worker(self, instance: str) -> None:
        self._send(WorkerCommand(free=instance))

    def refuse_worker(self, instance: str, reason: str) -> None:
        """Do nothing, because a refused worker exits by itself."""

    def _send(self, command: WorkerCommand) -> None:
        process = self._process
        if process is not None and process.stdin is not None and process.returncode is None:
            process.stdin.write(msgspec.json.encode(command) + b"\n")

    async def reports(self) -> AsyncIterator[Report]:
        """Yield the reports of the child process until it ends. If it fails, one report has the error message."""
        assert self._process is not None  # noqa: S101  (called after start)
        assert self._process.stdout is not None  # noqa: S101  (a pipe)
        explained = False
        async for line in self._process.stdout:
            report = msgspec.json.decode(line, type=Report)
            explained = explained or report.failure is not None
            yield report
        code = await self._process.wait()
        if code not in {0, -signal.SIGTERM} and not explained:
            yield Report(failure=f"the process that starts the workers ended with code {code}")

    async def stop(self, grace_s: float = 10.0) -> None:
        """Wait up to `grace_s` for workers that are shutting down, then kill the remaining workers."""
        if self._process is None:
            return
        self._send(WorkerCommand(finish=True))
        process = self._process
        with suppress(ProcessLookupError):  # it may end just when a wait does
            # On SIGTERM it kills its workers and exits; on SIGKILL they die with it.
            for end, wait_s in ((process.terminate, grace_s), (process.kill, TERMINATE_S)):
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), wait_s)
                    return
                end()
            await process.wait()


class LocalLauncher(Launcher):
    """Launcher of workers on this host, as children of a fork server."""

    def __init__(self, config: ServiceConfig) -> None:
        super().__init__("twofold.serving.launch.fork_server", config)
