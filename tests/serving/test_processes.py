"""The processes of a service: nothing is left behind, and a death is noticed."""

import asyncio
import glob
import os
import signal
import subprocess
import sys
import tempfile

import aiohttp
import psutil
import pytest

from support.api_client import served_name
from support.flags import ENGINE, SPLIT
from twofold.demo.services import free_port, wait_ready


@pytest.fixture
def own_service(model_dir):
    """A service that a test may break: (process, URL)."""
    port = free_port()
    command = [sys.executable, "-m", "twofold.cli.main", "serve", str(model_dir("llama")), *ENGINE, *SPLIT]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_ready(process, f"http://127.0.0.1:{port}")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def family(process):
    return psutil.Process(process.pid).children(recursive=True)


def leftovers():
    return set(glob.glob(f"{tempfile.gettempdir()}/twofold-*")) | set(glob.glob("/dev/shm/*twofold*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_leaves_no_process_and_no_file(own_service, number):
    """Ctrl-C and SIGTERM end every process and remove the service's directory."""
    process, _ = own_service
    children = family(process)
    assert len(children) == 3, "a nursery and two workers"
    process.send_signal(number)
    assert process.wait(timeout=60) == 0
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert not {path for path in leftovers() if f"-{process.pid}-" in path}


def test_a_killed_service_takes_its_workers_with_it(own_service):
    """SIGKILL leaves no chance to clean up, and nothing that would need it but a directory of sockets."""
    process, _ = own_service
    children = family(process)
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert not glob.glob("/dev/shm/*twofold*")


def test_a_dead_worker_fails_its_requests_and_the_health_check(own_service):
    """Nobody waits for ever: the stream ends with an error, new requests get 503."""
    process, url = own_service

    async def watch():
        async with aiohttp.ClientSession() as session:
            name = await served_name(session, url)
            body = {
                "model": name,
                "prompt": [5, 6, 7],
                "max_tokens": 1500,
                "ignore_eos": True,
                "stream": True,
            }
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.content.readline()
                worker = next(child for child in family(process) if "decode" in child.name())
                os.kill(worker.pid, signal.SIGKILL)
                rest = await response.content.read()
            async with (
                session.get(f"{url}/health") as health,
                session.post(f"{url}/v1/completions", json=body) as refused,
            ):
                return rest, health.status, refused.status, await refused.json()

    rest, health, refused, answer = asyncio.run(asyncio.wait_for(watch(), 120))
    assert b'"error"' in rest
    assert (health, refused) == (503, 503)
    assert "message" in answer["error"]
