"""`--gateway-processes`: HTTP in several processes, with limits and state in the process of the service."""

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from urllib.parse import urlsplit

import aiohttp
import pytest

from support.api_client import all_blocks_free, metric_falls
from support.flags import ENGINE, SPLIT
from support.running_service import ended, named, running_service
from twofold.serving.fronts.link import GatewayLink

PROMPT = [5, 6, 7] * 20
OUTPUT = 400
STREAMS = 12
HEADERS = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def fleet(tiny_model_dir, tmp_path_factory):
    """Yield the process and the URL of a service with three gateway processes, and a key with two places."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("all secret\nfew other 2\n")
    flags = (*ENGINE, *SPLIT, "--served-model-name", "tiny", "--gateway-processes", "3", "--api-keys", str(keys))
    with running_service(tiny_model_dir("llama"), *flags) as service:
        yield service


async def ask(url, method="POST", path="/v1/completions", headers=HEADERS, **fields):
    """Return status and body of an answer on a connection of its own."""
    body = {"model": "tiny", **fields} if method == "POST" else None
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, url + path, json=body) as answer,
    ):
        return answer.status, await answer.json()


async def stream(url, tokens, begun=None):
    """Append the tokens of a stream to `tokens`, and return whether it has ended whole."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    with suppress(aiohttp.ClientError):
        async with (
            aiohttp.ClientSession(headers=HEADERS) as session,
            session.post(f"{url}/v1/completions", json=body) as answer,
        ):
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                    if begun is not None:
                        begun.set()
                elif line.startswith(b"data: [DONE]"):
                    return True
    return False


def test_all_processes_answer_alike(fleet):
    _, url = fleet

    async def answers():
        fields = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        found = await asyncio.gather(*(ask(url, **fields) for _ in range(STREAMS)))
        assert {status for status, _ in found} == {200}
        assert len({answer["choices"][0]["text"] for _, answer in found}) == 1
        chat = {"messages": [{"role": "user", "content": "he is"}], "max_tokens": 3}
        assert (await ask(url, path="/v1/chat/completions", **chat))[0] == 200
        assert await ask(url, path="/v1/completions", headers={}, **fields) != 200

    asyncio.run(answers())


def test_state_is_that_of_the_service(fleet):
    """Every process answers from the responses, models and pools of the service."""
    _, url = fleet

    async def scenario():
        _, first = await ask(url, path="/v1/responses", input="he is", max_output_tokens=3)
        for _ in range(6):
            status, answer = await ask(url, "GET", f"/v1/responses/{first['id']}")
            assert (status, answer["id"]) == (200, first["id"])
            again = {"input": "on", "previous_response_id": first["id"], "max_output_tokens": 3}
            assert (await ask(url, path="/v1/responses", **again))[0] == 200
            assert len((await ask(url, "GET", "/pools"))[1]["pools"]) == 2
            assert (await ask(url, "GET", "/v1/models"))[1]["data"][0]["id"] == "tiny"
        assert (await ask(url, path="/v1/completions", prompt=PROMPT, max_tokens=-1))[0] == 400
        assert (await ask(url, path="/v1/nothing"))[0] == 404

    asyncio.run(scenario())


def test_limits_hold_over_all_processes(fleet):
    _, url = fleet
    few = {"Authorization": "Bearer other"}
    fields = {"prompt": PROMPT, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}

    async def scenario():
        async with AsyncExitStack() as stack:
            for _ in range(2):
                session = await stack.enter_async_context(aiohttp.ClientSession(headers=few))
                body = {"model": "tiny", **fields}
                answer = await stack.enter_async_context(session.post(f"{url}/v1/completions", json=body))
                await answer.content.readline()
            return await asyncio.gather(*(ask(url, headers=few, **fields) for _ in range(6)))

    refused = asyncio.run(scenario())
    assert {(status, body["error"]["code"]) for status, body in refused} == {(429, "key_limit")}


def test_a_killed_process_ends_its_streams_alone(fleet):
    process, url = fleet

    def connections(gateway):
        port = urlsplit(url).port
        return [each for each in gateway.net_connections() if each.status == "ESTABLISHED" and each.laddr.port == port]

    async def scenario():
        whole = []
        assert await stream(url, whole)
        got, begun = [[] for _ in range(STREAMS)], [asyncio.Event() for _ in range(STREAMS)]
        running = [asyncio.create_task(stream(url, *each)) for each in zip(got, begun, strict=True)]
        await asyncio.gather(*(each.wait() for each in begun))
        killed = max(named(process, "gateway"), key=lambda gateway: len(connections(gateway)))
        lost = len(connections(killed))
        killed.kill()
        ends = await asyncio.gather(*running)
        assert (lost, ends.count(False)) == (lost, lost)
        assert all(tokens == whole for tokens, end in zip(got, ends, strict=True) if end)
        assert all(tokens == whole[: len(tokens)] for tokens in got)
        assert ended([killed])
        while len(named(process, "gateway")) < 3:  # noqa: ASYNC110  (of another process)
            await asyncio.sleep(0.05)
        assert await stream(url, again := [])
        assert again == whole

    asyncio.run(scenario())
    assert asyncio.run(all_blocks_free(url))
    assert metric_falls(url, "num_requests_running", 0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_arrive_whole_in_pieces_of_any_size(size):
    received, sent = [], b"one\n\n" + b"x" * 500 + b"\nlast\nrest"
    link = GatewayLink(received.append, lambda: None)
    for start in range(0, len(sent), size):
        link.data_received(sent[start : start + size])
    assert received == [b"one", b"", b"x" * 500, b"last"]
