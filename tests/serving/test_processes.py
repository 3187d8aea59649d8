"""The processes of a service: nothing is left behind, and a death is noticed."""

import asyncio
import glob
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager

import aiohttp
import psutil
import pytest

from support.api_client import all_blocks_free, block_counts, complete, served_name
from support.flags import ENGINE, SPLIT
from support.tiny_models import write_tiny_model
from twofold.demo.services import free_port, wait_ready


@contextmanager
def breakable(model, *flags):
    """A service that a test may break: (process, URL)."""
    port = free_port()
    command = [sys.executable, "-m", "twofold.cli.main", "serve", str(model), *ENGINE, *flags]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        assert wait_ready(process, f"http://127.0.0.1:{port}")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


# Nothing ends such an answer by itself, however long a test is kept from acting.
ENDLESS = 40_000


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory):
    return write_tiny_model("llama", tmp_path_factory.mktemp("endless"), max_positions=ENDLESS + 100)


@pytest.fixture
def endless_service(endless_model):
    with breakable(endless_model, *SPLIT) as running:
        yield running


@pytest.fixture
def own_service(tiny_model_dir):
    with breakable(tiny_model_dir("llama"), *SPLIT) as running:
        yield running


def worker(process, name):
    return next(child.pid for child in family(process) if name in child.name())


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
    assert process.wait(timeout=300) == 0
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    assert not {path for path in leftovers() if f"-{process.pid}-" in path}


def test_a_killed_service_takes_its_workers_with_it(own_service):
    """SIGKILL leaves no chance to clean up, and nothing that would need it but a directory of sockets."""
    process, _ = own_service
    children = family(process)
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    assert not glob.glob("/dev/shm/*twofold*")


def test_a_dead_worker_fails_its_requests_and_the_health_check(endless_service):
    """Nobody waits for ever: the stream ends with an error, new requests get 503."""
    process, url = endless_service

    async def watch():
        async with aiohttp.ClientSession() as session:
            name = await served_name(session, url)
            body = {
                "model": name,
                "prompt": [5, 6, 7],
                "max_tokens": ENDLESS,
                "ignore_eos": True,
                "stream": True,
            }
            async with session.post(f"{url}/v1/completions", json=body) as response:
                for _ in range(9):  # two lines a token: well in the decode
                    await response.content.readline()
                os.kill(worker(process, "decode"), signal.SIGKILL)
                rest = await response.content.read()
            async with (
                session.get(f"{url}/health") as health,
                session.post(f"{url}/v1/completions", json=body) as refused,
            ):
                return rest, health.status, refused.status, await refused.json()

    rest, health, refused, answer = asyncio.run(asyncio.wait_for(watch(), 600))
    assert b'"error"' in rest
    assert (health, refused) == (503, 503)
    assert "message" in answer["error"]


def test_a_prefill_worker_that_dies_during_the_hand_off_fails_the_request(own_service):
    """The first token is out and the KV cache is not whole: the client is told and nothing stays behind."""
    process, url = own_service

    async def watch():
        async with aiohttp.ClientSession() as session:
            name = await served_name(session, url)
            body = {"model": name, "prompt": [5] * 64, "max_tokens": 50, "ignore_eos": True, "stream": True}
            os.kill(worker(process, "decode"), signal.SIGSTOP)  # so that no lease is granted
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.content.readline()
                os.kill(worker(process, "prefill"), signal.SIGKILL)
                os.kill(worker(process, "decode"), signal.SIGCONT)
                return await response.content.read()

    rest = asyncio.run(asyncio.wait_for(watch(), 600))
    assert b'"error"' in rest
    assert asyncio.run(all_blocks_free(url))


def test_a_service_with_workers_left_for_both_phases_goes_on(tiny_model_dir):
    """One of two prefill workers dies: what comes later is served by the other."""
    with breakable(tiny_model_dir("llama"), "--prefill", "2", "--decode", "1") as (process, url):
        os.kill(worker(process, "prefill-0"), signal.SIGKILL)

        async def go_on():
            async with aiohttp.ClientSession() as session:
                while "prefill-0" in block_counts(url):  # noqa: ASYNC110 (another process notices its death)
                    await asyncio.sleep(0.05)
                return [
                    len(await complete(session, url, [7] * 40, max_tokens=4, ignore_eos=True))
                    for _ in range(4)
                ]

        assert asyncio.run(asyncio.wait_for(go_on(), 600)) == [4] * 4
        assert asyncio.run(all_blocks_free(url))
