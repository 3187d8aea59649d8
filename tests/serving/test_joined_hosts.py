"""Workers that join from another host, over TCP on this one: who may, what they answer, and what is done about ends."""

import asyncio
import signal

import aiohttp
import pytest

from support.api_client import all_blocks_free, block_counts, complete
from support.flags import COLOCATED
from support.joined_service import JoinedService, joined_service, worker
from support.running_service import children
from support.tiny_models import write_tiny_model
from twofold.security.key import write_key

QUESTIONS = [
    {
        "prompt": [5 + i, 6, 7] * (20 * i + 1),
        "max_tokens": 40,
        "temperature": i % 2,
        "seed": i,
        "ignore_eos": True,
    }
    for i in range(6)
]


async def ask(url):
    """The answers to all questions, asked at once."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        return await asyncio.gather(*(complete(session, url, **question) for question in QUESTIONS))


@pytest.fixture(scope="module")
def expected(service):
    """What workers answer that do both phases."""
    return asyncio.run(ask(service("llama", COLOCATED)))


@pytest.fixture(scope="module")
def joined(tiny_model_dir, tmp_path_factory):
    folder, here = tmp_path_factory.mktemp("joined"), ("--prefill", "1", "--decode", "0")
    with joined_service(tiny_model_dir("llama"), folder, *here) as running:
        yield running


def test_the_answers_are_those_of_one_host(joined, expected):
    """Token for token, and nothing stays behind on either host."""
    assert asyncio.run(ask(joined.url)) == expected
    assert asyncio.run(all_blocks_free(joined.url))
    assert set(block_counts(joined.url)) == {"prefill-0", "decode-0"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_worker_on_either_host_may_end_or_hang(joined, expected, name, number):
    """It is started again where it was, and no stream is broken."""
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
def test_a_stranger_is_not_heard(joined, expected, tmp_path, key):
    """Who has another key, or speaks without one, gets no answer; the service notes it, and lives on."""
    before = len(joined.said("serve.log"))
    if key == "another":
        write_key(tmp_path / "key")
        process = joined.join("--decode", "1", key=tmp_path / "key", log="stranger.log", name="stranger")
        joined.wait_said("stranger.log", "asking")
        joined.wait_said("serve.log", "refused a connection", before)
        assert "loading the model" not in joined.said("stranger.log")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    else:
        import zmq

        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(joined.controller)
            socket.send(b"\x81\xa4type\xa8Shutdown")
            joined.wait_said("serve.log", "refused a connection", before)
    assert asyncio.run(ask(joined.url)) == expected
    secret = joined.key.read_text().splitlines()[-1]
    assert secret not in joined.said("serve.log") + joined.said("join.log")


def test_who_has_another_model_is_told_so_on_both_hosts(joined, tmp_path):
    """Before it has loaded it."""
    other = write_tiny_model("llama", tmp_path / "model", seed=1)
    process = joined.join("--decode", "1", model=other, log="refused.log", name="third")
    assert process.wait(120) == 2
    assert "third has another model than the service" in joined.said("refused.log")
    assert "third has another model than the service" in joined.said("serve.log")


def test_who_brings_what_is_of_no_use_is_told_so(joined):
    """A service that is split has no place for workers that do both."""
    process = joined.join("--mixed", "1", log="mixed.log", name="fourth")
    assert process.wait(120) == 2
    assert "no use for a mixed worker: it is split" in joined.said("mixed.log")


def test_a_second_host_of_the_same_name_is_refused(joined, expected):
    """And the first is none the worse for it."""
    process = joined.join("--decode", "1", log="second.log")
    assert process.wait(120) == 2
    assert "give this one another --name" in joined.said("second.log")
    assert asyncio.run(ask(joined.url)) == expected


def test_a_host_that_dies_may_come_back(joined, expected):
    """Its workers die with it; what it had goes on where there is room again, under the same names."""
    family = children(joined.host)

    async def watch():
        streams = asyncio.create_task(ask(joined.url))
        await asyncio.sleep(0.1)
        joined.host.kill()
        joined.host.wait()
        joined.host = joined.join("--decode", "1", log="again.log")
        return await streams

    assert asyncio.run(watch()) == expected
    assert not any(process.is_running() and process.status() != "zombie" for process in family)
    assert set(block_counts(joined.url)) == {"prefill-0", "decode-0"}
    assert asyncio.run(all_blocks_free(joined.url))


def test_hosts_outlive_a_service_that_is_killed_and_end_with_one_that_ends(joined, expected):
    """The last test of this service. The next one at its address has the host again, which then ends with it."""
    joined.service.kill()
    joined.service.wait()
    joined.serve("--prefill", "1", "--decode", "0")
    joined.wait()
    assert asyncio.run(ask(joined.url)) == expected
    joined.service.send_signal(signal.SIGINT)
    assert joined.service.wait(120) == 0
    assert joined.host.wait(120) == 0


def test_shared_memory_ends_at_the_host(tiny_model_dir, tmp_path):
    """A service that was told to use it refuses who does not share it."""
    running = JoinedService(tiny_model_dir("llama"), tmp_path)
    try:
        running.serve("--prefill", "1", "--decode", "1", "--transport", "shared_memory")
        running.wait()
        assert running.join("--decode", "1").wait(120) == 2
        for log in ("serve.log", "join.log"):
            assert "moves KV through shared_memory, which other does not share" in running.said(log)
    finally:
        running.close()
