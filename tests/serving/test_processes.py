"""Clean shutdown of a service's processes, and recovery of killed workers."""

import asyncio
import glob
import os
import signal
import tempfile

import aiohttp
import psutil
import pytest

from support.api_client import all_blocks_free, complete, served_name
from support.flags import ENGINE, SPLIT
from support.running_service import children, named, running_service


@pytest.fixture
def own_service(tiny_model_dir):
    with running_service(tiny_model_dir("llama"), *ENGINE, *SPLIT) as running:
        yield running


@pytest.fixture(scope="module")
def lasting_service(tiny_model_dir):
    """Yield a service with short restart delays, so that tests can kill its workers repeatedly."""
    with running_service(tiny_model_dir("llama"), *ENGINE, *SPLIT, "--max-restart-delay", "1") as running:
        yield running


def worker(process, name):
    return named(process, f".*{name}.*")[0].pid


def leftovers():
    return set(glob.glob(f"{tempfile.gettempdir()}/twofold-*")) | set(glob.glob("/dev/shm/*twofold*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_leaves_no_process_and_no_file(own_service, number):
    """Ctrl-C and SIGTERM both end all processes and delete all files of the service."""
    process, _ = own_service
    family = children(process)
    assert len(family) == 3, "a fork server and two workers"
    process.send_signal(number)
    assert process.wait(timeout=600) == 0
    _, alive = psutil.wait_procs(family, timeout=600)
    assert not alive
    assert not {path for path in leftovers() if f"-{process.pid}-" in path}


def test_workers_end_with_a_killed_service(own_service):
    process, _ = own_service
    family = children(process)
    process.kill()
    _, alive = psutil.wait_procs(family, timeout=600)
    assert not alive
    assert not glob.glob("/dev/shm/*twofold*")


def test_workers_share_the_session_but_not_the_process_group_of_the_gateway(lasting_service):
    """Ctrl-C in a terminal reaches only the gateway, and Linux schedules all processes as one autogroup."""
    process, _ = lasting_service
    for child in children(process):
        assert os.getsid(child.pid) == os.getsid(process.pid)
        assert os.getpgid(child.pid) != os.getpgid(process.pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_only_worker_of_a_phase_is_restarted(lasting_service, name, number):
    """Streams stay complete after their only prefill or decode worker fails."""
    process, url = lasting_service

    async def watch():
        async with aiohttp.ClientSession() as session:
            fields = {"max_tokens": 120, "ignore_eos": True, "temperature": 1.0, "seed": 6}
            whole = await complete(session, url, [5, 6, 7] * 30, **fields)
            before = worker(process, name)
            streams = [asyncio.create_task(complete(session, url, [5, 6, 7] * 30, **fields)) for _ in range(3)]
            await asyncio.sleep(0.1)
            os.kill(before, number)
            assert await asyncio.gather(*streams) == [whole] * 3
            assert await complete(session, url, [5, 6, 7] * 30, **fields) == whole
            assert worker(process, name) != before, "the worker must be a new process"

    asyncio.run(asyncio.wait_for(watch(), 600))
    assert asyncio.run(all_blocks_free(url))


def test_a_prefill_worker_killed_during_a_handoff_is_replaced(lasting_service):
    process, url = lasting_service

    async def watch():
        async with aiohttp.ClientSession() as session:
            name = await served_name(session, url)
            body = {"model": name, "prompt": [5] * 64, "max_tokens": 50, "ignore_eos": True, "stream": True}
            os.kill(worker(process, "decode"), signal.SIGSTOP)  # so that no lease is granted
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.content.readline()
                os.kill(worker(process, "prefill"), signal.SIGKILL)
                return await response.content.read()

    rest = asyncio.run(asyncio.wait_for(watch(), 600))
    assert b'"error"' not in rest
    assert rest.count(b"data: {") >= 49
    assert asyncio.run(all_blocks_free(url))


def test_requests_are_served_by_the_remaining_prefill_worker(tiny_model_dir):
    with running_service(tiny_model_dir("llama"), *ENGINE, "--prefill", "2", "--decode", "1") as (process, url):

        async def go_on():
            async with aiohttp.ClientSession() as session:
                os.kill(worker(process, "prefill-0"), signal.SIGKILL)
                return [len(await complete(session, url, [7] * 40, max_tokens=4, ignore_eos=True)) for _ in range(4)]

        assert asyncio.run(asyncio.wait_for(go_on(), 600)) == [4] * 4
        assert asyncio.run(all_blocks_free(url))
