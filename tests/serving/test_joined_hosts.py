"""Workers of a second host process, which joins the service over TCP."""

import asyncio
import signal

import aiohttp
import pytest

from support.api_client import all_blocks_free, block_counts, complete
from support.flags import COLOCATED
from support.joined_service import JoinedService, joined_service, worker
from support.running_service import children, ended
from support.tiny_models import write_tiny_model
from twofold.security.key import write_key

QUESTIONS = [
    {"prompt": [5 + i, 6, 7] * (20 * i + 1), "max_tokens": 40, "temperature": i % 2, "seed": i, "ignore_eos": True}
    for i in range(6)
]


async def ask(url):
    """Send all test prompts to the service at once and return their output tokens."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        return await asyncio.gather(*(complete(session, url, **question) for question in QUESTIONS))


@pytest.fixture(scope="module")
def expected(service):
    """Return the outputs of colocated workers on one host for the test prompts."""
    return asyncio.run(ask(service("llama", COLOCATED)))


@pytest.fixture(scope="module")
def joined(tiny_model_dir, tmp_path_factory):
    folder, here = tmp_path_factory.mktemp("joined"), ("--prefill", "1", "--decode", "0")
    with joined_service(tiny_model_dir("llama"), folder, *here) as running:
        yield running


@pytest.mark.covers(engine="torch", model="llama", transport="curve", feature=("handoff", "hosts"))
def test_output_equals_that_of_one_host(joined, expected):
    assert asyncio.run(ask(joined.url)) == expected
    assert asyncio.run(all_blocks_free(joined.url))
    assert set(block_counts(joined.url)) == {"prefill-0", "decode-0"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_failed_worker_is_restarted_on_its_host(joined, expected, name, number):
    process = joined.service if name == "prefill" else joined.host
    before = worker(process, name)

    async def watch():
        streams = asyncio.create_task(ask(joined.url))
        await asyncio.sleep(0.1)
        before.send_signal(number)
        return await streams

    assert asyncio.run(watch()) == expected
    assert asyncio.run(ask(joined.url)) == expected
    assert worker(process, name).pid != before.pid
    assert asyncio.run(all_blocks_free(joined.url))


@pytest.mark.parametrize("key", ["none", "another"])
def test_rejects_clients_without_the_cluster_key(joined, expected, tmp_path, key):
    """The service logs the refused connection and continues to serve requests."""
    before = len(joined.logged("serve.log"))
    if key == "another":
        write_key(tmp_path / "key")
        process = joined.join("--decode", "1", key=tmp_path / "key", log="stranger.log", name="stranger")
        joined.wait_logged("stranger.log", "asking")
        joined.wait_logged("serve.log", "refused a connection", before)
        assert "loading the model" not in joined.logged("stranger.log")
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 0
    else:
        import zmq

        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(joined.controller)
            socket.send(b"\x81\xa4type\xa8Shutdown")
            joined.wait_logged("serve.log", "refused a connection", before)
    assert asyncio.run(ask(joined.url)) == expected
    secret = joined.key.read_text().splitlines()[-1]
    assert secret not in joined.logged("serve.log") + joined.logged("join.log")


def test_rejects_a_host_with_another_model(joined, tmp_path):
    other = write_tiny_model("llama", tmp_path / "model", seed=1)
    process = joined.join("--decode", "1", model=other, log="refused.log", name="third")
    assert process.wait(600) == 2
    assert "third has another model than the service" in joined.logged("refused.log")
    assert "third has another model than the service" in joined.logged("serve.log")


def test_rejects_mixed_workers_in_a_split_service(joined):
    process = joined.join("--colocated", "1", log="mixed.log", name="fourth")
    assert process.wait(600) == 2
    assert "cannot use a mixed worker: it is split" in joined.logged("mixed.log")


def test_rejects_a_second_host_of_the_same_name(joined, expected):
    process = joined.join("--decode", "1", log="second.log")
    assert process.wait(600) == 2
    assert "give this one another --name" in joined.logged("second.log")
    assert asyncio.run(ask(joined.url)) == expected


def test_a_killed_host_may_rejoin_under_its_names(joined, expected):
    family = children(joined.host)

    async def watch():
        streams = asyncio.create_task(ask(joined.url))
        await asyncio.sleep(0.1)
        joined.host.kill()
        joined.host.wait()
        joined.host = joined.join("--decode", "1", log="again.log")
        return await streams

    assert asyncio.run(watch()) == expected
    assert ended(family), "the workers of a dead host end themselves"
    assert set(block_counts(joined.url)) == {"prefill-0", "decode-0"}
    assert asyncio.run(all_blocks_free(joined.url))


def test_hosts_outlive_a_killed_service_and_end_with_a_stopped_one(joined, expected):
    # Runs last, because the tests of this file share the service.
    joined.service.kill()
    joined.service.wait()
    joined.serve("--prefill", "1", "--decode", "0")
    joined.wait()
    assert asyncio.run(ask(joined.url)) == expected
    joined.service.send_signal(signal.SIGINT)
    assert joined.service.wait(600) == 0
    assert joined.host.wait(600) == 0


@pytest.mark.refuses(engine="torch", transport="shared_memory", feature="hosts")
def test_rejects_remote_hosts_under_shared_memory(tiny_model_dir, tmp_path):
    running = JoinedService(tiny_model_dir("llama"), tmp_path)
    try:
        running.serve("--prefill", "1", "--decode", "1", "--transport", "shared_memory")
        running.wait()
        assert running.join("--decode", "1").wait(600) == 2
        for log in ("serve.log", "join.log"):
            assert "moves KV through shared_memory, which other does not share" in running.logged(log)
    finally:
        running.close()
