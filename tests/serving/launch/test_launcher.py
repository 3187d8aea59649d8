"""Tests of the process that starts the workers, when it ends."""

import asyncio
import sys

from twofold.serving.launch import launcher
from twofold.serving.launch.local_service import LocalLauncher


async def stop_at_the_last_moment(monkeypatch):
    """Stop a launcher. Its child process ends together with the grace period."""
    stopped = LocalLauncher(None)
    stopped._process = process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "pass", stdout=asyncio.subprocess.PIPE
    )

    async def wait_for(waiting, _seconds):
        await waiting
        await process.stdout.read()
        raise TimeoutError

    monkeypatch.setattr(launcher.asyncio, "wait_for", wait_for)
    await stopped.stop()
    return process.returncode


def test_a_child_process_may_end_with_its_grace_period(monkeypatch):
    assert asyncio.run(stop_at_the_last_moment(monkeypatch)) == 0
