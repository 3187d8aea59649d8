"""A request split over two unmodified vLLM servers gets the same tokens as on one server, and leaks no blocks."""

import asyncio
import json
import os
import random
import shutil
import signal

import aiohttp
import httpx
import pytest

pytest.importorskip("vllm")

from serving.test_disconnects import check_disconnects
from support.api_client import complete, complete_all, complete_cached, metric, metric_falls, metric_reaches
from support.running_service import ROUTE, running_service

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


def prompts(count, seed, longest=900):
    draw = random.Random(seed)
    return [[draw.randint(10, 500) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def handoffs(fleet):
    return metric(fleet.url, "kv_transfer_seconds_count")


async def settled(fleet):
    """Wait until all KV blocks of all servers are free; return False on timeout."""
    free = [await asyncio.to_thread(server.frees_all_blocks) for server in fleet.servers]
    return all(free)


BLOCKS = 8  # of 128 tokens


def test_conductor_routes_to_cached_prefixes(vllm_pair):
    """The gateway learns cached prefixes from vLLM's KV events, even if other clients sent the prompts."""
    model, servers = vllm_pair
    flags = ("--model", str(model), "--served-model-name", "tiny", "--router", "conductor", "--probe-timeout", "600")
    both = [flag for one in servers for flag in ("--colocated", f"{one.url},events={one.events}")]
    draw = random.Random(8)
    with running_service(None, *flags, *both, program=ROUTE) as (_, url):

        def announced(server, *, tries):
            """Send a random prompt to a server, and wait for the gateway to index the prompt's cached blocks."""
            prompt = [draw.randint(10, 500) for _ in range(BLOCKS * 128 + 1)]
            known = metric(url, "prefix_index_blocks")
            server.complete(prompt=prompt, max_tokens=1)
            return prompt, metric_reaches(url, "prefix_index_blocks", known + BLOCKS, tries=tries)

        for server in servers:  # events before the subscription are lost
            assert any(announced(server, tries=100)[1] for _ in range(60)), "no prompt was announced"
        for server in servers * 12:
            prompt, known = announced(server, tries=6000)
            assert known, "a prompt was not announced"
            before = server.metric("prefix_cache_hits_total")
            assert metric_falls(url, "prefill_queue_seconds", 0), "the previous request is still queued"
            asyncio.run(complete_all(url, [prompt], at_once=1, **GREEDY))
            assert server.metric("prefix_cache_hits_total") - before >= BLOCKS * 128


def test_greedy_tokens_equal_one_server(fleet):
    """Prefilled on one server and decoded on another, concurrent requests get the same tokens as on a single server."""
    asked = [*prompts(8, 1), *([(number * 7) % 500 for number in range(n)] for n in (127, 128, 129, 256, 384))]
    alone = [fleet.decode.complete(prompt=prompt, max_tokens=40) for prompt in asked]
    before = handoffs(fleet)
    assert asyncio.run(complete_all(fleet.url, asked, at_once=6, **GREEDY)) == alone
    assert handoffs(fleet) - before == len(asked), "each was handed off"
    assert asyncio.run(settled(fleet))


def test_sampled_tokens_equal_one_server(fleet):
    """With a fixed seed, separate prefill and decode servers sample the same tokens as a single server."""
    (prompt,) = prompts(1, 2)
    fields = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 40, "ignore_eos": True}
    assert asyncio.run(complete_all(fleet.url, [prompt], at_once=1, **fields)) == [
        fleet.decode.complete(prompt=prompt, **fields)
    ]


def test_one_token_needs_no_decode(fleet):
    before = handoffs(fleet)
    fields = {**GREEDY, "max_tokens": 1}
    (tokens,) = asyncio.run(complete_all(fleet.url, prompts(1, 3), at_once=1, **fields))
    assert len(tokens) == 1
    assert handoffs(fleet) == before


def test_unfetched_kv_is_released_immediately(fleet):
    """If the output ends at the first token, the prefill server frees the KV immediately."""
    expired = fleet.prefill.metric("nixl_num_kv_expired_reqs_total")
    (prompt,) = prompts(1, 4)
    (first,) = fleet.decode.complete(prompt=prompt, max_tokens=1)
    fields = {"temperature": 0, "max_tokens": 40, "stop_token_ids": [first]}
    assert asyncio.run(complete_all(fleet.url, [prompt], at_once=1, **fields)) == [[first]]
    assert fleet.prefill.frees_all_blocks()
    assert fleet.prefill.metric("nixl_num_kv_expired_reqs_total") == expired, "the lease ended"


def test_usage_reports_cached_tokens(fleet):
    prompt = [number % 490 + 5 for number in range(300)]

    async def ask():
        async with aiohttp.ClientSession() as session:
            await complete(session, fleet.url, prompt, **GREEDY)
            return await complete_cached(session, fleet.url, prompt, **GREEDY)

    _, cached = asyncio.run(ask())
    assert cached == 256, "two whole blocks of 128 tokens"


def test_disconnects_free_every_block(fleet):
    """All blocks become free after clients disconnect in the queue, in prefill, in the hand-off and in decode."""
    check_disconnects(fleet.url, 40, settled=lambda _: settled(fleet))


def with_tools(model, directory):
    """Copy the tokenizer of a model, with a chat template that shows tools."""
    copied = shutil.copytree(model, directory / "with-tools", ignore=shutil.ignore_patterns("*.safetensors"))
    file = copied / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": "{{ tools }}" + config["chat_template"]}))
    return copied


def test_a_forced_call_is_the_same_split_and_on_one_server(vllm_pair, tmp_path):
    """The grammar of a forced tool call holds from the first token, on the prefill server and on the decode server."""
    model, (prefill, decode) = vllm_pair
    model = with_tools(model, tmp_path)
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    # The grammar allows white space, of which the random model would write too much.
    spaces = {str(number): -100 for token, number in vocabulary.items() if set(token) <= set("ĠĊĉč")}
    flags = ("--model", str(model), "--served-model-name", "tiny", "--tool-parser", "hermes")
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    city["additionalProperties"] = False
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": city}}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0,
        "max_tokens": 200,
        "logit_bias": spaces,
    }
    answers = []
    for servers in (("--prefill", prefill.url, "--decode", decode.url), ("--colocated", decode.url)):
        with running_service(None, *flags, *servers, program=ROUTE) as (_, url):
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            assert "tool_calls" in choice["message"], choice
            (call,) = choice["message"]["tool_calls"]
            answers.append((choice["finish_reason"], call["function"]["name"], call["function"]["arguments"]))
    assert answers[0] == answers[1]
    reason, name, arguments = answers[0]
    assert (reason, name) == ("tool_calls", "get_weather")
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")


async def streaming(fleet, asked, count, hit):
    """Run streams of one prompt, inject a fault, and return the tokens of each stream."""
    going, tokens = asyncio.Event(), [[] for _ in range(count)]

    async def one(session, number):
        body = {"model": "tiny", "prompt": asked, "stream": True, "return_token_ids": True, **LONG}
        async with session.post(f"{fleet.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    tokens[number] += event["choices"][0]["token_ids"]
                    if all(tokens):
                        going.set()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        streams = [asyncio.create_task(one(session, number)) for number in range(count)]
        await going.wait()
        hit()
        await asyncio.gather(*streams)
    return tokens


LONG = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_streams_survive_a_crashed_or_hung_server(watched_fleet, role, number):
    """A server failure changes no output, and the recovered server gets requests again."""
    fleet = watched_fleet
    server = getattr(fleet, role)
    (asked,) = prompts(1, 6)
    alone = fleet.prefill.complete(prompt=asked, max_tokens=300)
    replays = metric(fleet.url, "request_replays_total")
    tokens = asyncio.run(streaming(fleet, asked, 3, lambda: server.send(number)))
    assert tokens == [alone] * 3
    if role == "decode":
        assert metric(fleet.url, "request_replays_total") - replays >= 3
    # Meanwhile the other server serves both phases.
    assert asyncio.run(complete_all(fleet.url, [asked], at_once=1, **LONG)) == [alone]
    if number == signal.SIGKILL:
        server.kill()
        server.start()
        server.wait()
    else:
        server.send(signal.SIGCONT)
    asyncio.run(handed_off_again(fleet, asked, alone))
    assert asyncio.run(settled(fleet))


async def handed_off_again(fleet, asked, alone):
    """Send requests until one is handed off between the two servers."""
    before = handoffs(fleet)
    async with aiohttp.ClientSession() as session:
        for _ in range(6000):
            assert await complete(session, fleet.url, asked, **LONG) == alone
            if await asyncio.to_thread(handoffs, fleet) > before:
                return
            await asyncio.sleep(0.2)
    raise AssertionError("no request was handed off any more")


def test_a_killed_gateway_leaves_no_requests(fleet):
    """The servers abort all requests of a killed gateway."""

    async def leave():
        async with aiohttp.ClientSession() as session:
            body = {"model": "tiny", "prompt": [9] * 500, "stream": True, **LONG}
            async with session.post(f"{fleet.url}/v1/completions", json=body) as response:
                await response.content.readline()
                os.kill(fleet.process.pid, signal.SIGKILL)

    asyncio.run(leave())
    assert asyncio.run(settled(fleet))
