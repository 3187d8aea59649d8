"""The programs of bench/gateway in C: the mock vLLM server behind `twofold route`, and the load generator before it."""

import asyncio
import json
import shutil
import subprocess
from contextlib import ExitStack, contextmanager

import pytest
from bench.gateway.native import LOAD, MOCK, compile_programs, offer, set_gap

from support.running_service import ROUTE, running_service
from twofold.bench.services import free_port, wait_ready
from twofold.serving.upstream.client import REMOTE_DECODE, RejectedError, VllmClient, rejected_decode_body
from twofold.serving.upstream.metrics import read_metrics

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

TOKENS = 5
VOCABULARY = 512  # of the tiny model
PROMPT = [7] * 40


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Return the directory of the compiled programs."""
    folder = tmp_path_factory.mktemp("programs")
    compile_programs(folder)
    return folder


@contextmanager
def mock_server(programs):
    """Run a mock server and yield its URL."""
    port = free_port()
    process = subprocess.Popen([programs / MOCK, "--port", str(port), "--vocab-size", str(VOCABULARY)])
    try:
        assert wait_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def servers(programs):
    """Yield the URLs of two mock servers."""
    with ExitStack() as running:
        yield [running.enter_context(mock_server(programs)) for _ in range(2)]


@pytest.fixture(scope="module")
def routes(servers, tiny_model_dir):
    """Yield the URLs of a gateway with a prefill and a decode server, and of one with a server for both phases."""
    prefill, decode = servers
    model = ("--model", str(tiny_model_dir("llama")), "--served-model-name", "mock")
    with ExitStack() as running:
        split, whole = (
            running.enter_context(running_service(None, *model, *flags, program=ROUTE))
            for flags in (("--prefill", prefill, "--decode", decode), ("--colocated", prefill))
        )
        yield split[1], whole[1]


def body(**fields):
    fields = {"model": "mock", "prompt": PROMPT, "max_tokens": TOKENS, "return_token_ids": True} | fields
    return json.dumps(fields).encode()


def with_client(url, use):
    """Return the result of the coroutine function `use`, called with the router's client of a server."""

    async def run():
        client = VllmClient(url)
        try:
            return await use(client)
        finally:
            client.close()

    return asyncio.run(run())


def load(programs, url, *flags):
    command = [programs / LOAD, "--port", url.rpartition(":")[2], "--connections", "4", "--seconds", "0.2", *flags]
    return offer(list(map(str, command)), 600)


@pytest.mark.parametrize("gap_ms", [0, 1])
def test_streams_and_whole_outputs_have_the_same_tokens(servers, gap_ms):
    set_gap(servers[0], gap_ms)

    async def both(client):
        whole = await client.complete(body())
        events = []
        await client.stream(body(stream=True), events.append)
        return whole.choices, [choice for event in events for choice in event.choices]

    (whole,), parts = with_client(servers[0], both)
    assert len(whole.token_ids) == TOKENS
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [part.finish_reason for part in parts] == [None] * (TOKENS - 1) + ["length"]


def test_a_prefill_locates_its_kv(servers):
    """A prefill for another server returns a token and where its KV is; a decode that must be refused is refused."""

    async def prefill(client):
        answer = await client.complete(body(max_tokens=1, kv_transfer_params=REMOTE_DECODE))
        with pytest.raises(RejectedError):
            await client.complete(rejected_decode_body("mock", answer.kv_transfer_params))
        return answer

    answer = with_client(servers[0], prefill)
    assert answer.kv_transfer_params["do_remote_prefill"] is True
    assert len(answer.choices[0].token_ids) == 1


def test_the_router_can_read_metrics_and_the_model(servers):
    async def describe(client):
        return read_metrics(await client.metrics(60)), await client.card(60)

    metrics, card = with_client(servers[0], describe)
    assert metrics.capacity_tokens > card.max_model_len
    assert card.id == "mock"


@pytest.mark.parametrize("flags", [(), ("--stream",), ("--stream", "--stops", "4"), ("--stream", "--rate", "40")])
def test_the_load_passes_through_a_router(programs, routes, servers, flags):
    """Every request that passes through `twofold route` yields all of its tokens."""
    set_gap(servers[1], 1)
    for url in routes:
        result = load(programs, url, "--tokens", TOKENS, *flags)
        assert result.errors == 0, result.error
        assert result.requests == result.sent > 0
        assert result.tokens == TOKENS * result.requests


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_chats_reach_the_mock_server_without_a_router(programs, servers, flags):
    result = load(programs, servers[1], "--chat", "--tokens", TOKENS, *flags)
    assert result.errors == 0, result.error
    assert result.tokens == TOKENS * result.requests > 0


def test_refused_requests_are_errors(programs, servers):
    result = load(programs, servers[0], "--tokens", 1 << 30)
    assert result.requests == 0
    assert result.errors == result.sent > 0
    assert "max_tokens" in result.error
