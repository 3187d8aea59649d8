"""`twofold route` in front of two Twofold services, which implement vLLM's API without KV transfer."""

import asyncio
import json
import signal
from contextlib import ExitStack
from functools import cache

import aiohttp
import pytest

from support.api_client import complete, complete_all, metric
from support.flags import ENGINE
from support.running_service import ROUTE, running_service
from twofold.bench.services import free_port

GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
PENALTY = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
PROMPT = [5, 6, 7] * 30
TEXT = "Return the names of all files, and why they differ. " * 4


@pytest.fixture(scope="module")
def behind(tiny_model_dir):
    """Yield two mixed-role services as (process, URL) pairs."""
    with ExitStack() as running:
        flags = (*ENGINE, "--colocated", "1", "--served-model-name", "tiny")
        yield [running.enter_context(running_service(tiny_model_dir("llama"), *flags)) for _ in range(2)]


@pytest.fixture(scope="module")
def routes(behind, tiny_model_dir):
    """Yield a function that starts a gateway in front of two services and returns its URL."""
    with ExitStack() as running:

        def start(probe_timeout):
            flags = ("--model", str(tiny_model_dir("llama")), "--served-model-name", "tiny")
            servers = [flag for _, url in behind for flag in ("--colocated", url)]
            gateway = running_service(None, *flags, "--probe-timeout", str(probe_timeout), *servers, program=ROUTE)
            return running.enter_context(gateway)[1]

        yield cache(start)


@pytest.fixture
def route(routes):
    """Return the URL of a gateway that never considers a server hung."""
    return routes(3600)


def alone(url, prompts, **fields):
    return asyncio.run(complete_all(url, prompts, at_once=4, **{**GREEDY, **fields}))


def test_answers_equal_the_servers_answers(route, behind):
    """A gateway in front of two servers gives the same greedy and sampled answers as one server alone.
    Each of the two servers gets requests.
    """
    prompts = [[number, 9, 11] * 20 for number in range(6)]
    for fields in ({}, {"temperature": 1.0, "seed": 5}):
        assert alone(route, prompts, **fields) == alone(behind[0][1], prompts, **fields)
    routed = [metric(url, "request_success_total") for _, url in behind]
    assert all(routed), "both were asked"


def posted(url, path, **fields):
    """Return the bodies of a response: one, or those of a stream's events."""
    _, _, text = asked(url, path, {"model": "tiny", **GREEDY, **fields})
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.endswith("}")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_texts_that_servers_tokenize_are_answered_as_by_the_servers(route, behind, path):
    prompt = {"prompt": TEXT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": TEXT}]}
    options = ({}, {"n": 2, "temperature": 1.0, "seed": 5}, {"stream": True, "stream_options": {"include_usage": True}})
    for fields in options:
        routed, directly = (said(posted(url, path, **prompt, **fields)) for url in (route, behind[0][1]))
        assert routed == directly
    whole = said(posted(route, path, **prompt))[0][0]
    stop = whole[len(whole) // 2 :][:3]
    stopped, directly = (said(posted(url, path, **prompt, stop=stop)) for url in (route, behind[0][1]))
    assert stopped == directly
    assert stopped[0][0] == whole[: whole.index(stop)]


def said(bodies):
    """Return the texts and finish reasons of an answer's choices, and its usage."""
    choices = {}
    for body in bodies:
        for choice in body["choices"]:
            text, reason = choices.get(choice["index"], ("", None))
            part = choice.get("text")
            if part is None:
                part = choice.get("message", choice.get("delta"))["content"] or ""
            choices[choice["index"]] = (text + part, choice["finish_reason"] or reason)
    return [*(choices[index] for index in sorted(choices)), bodies[-1]["usage"]["total_tokens"]]


def test_a_client_disconnect_ends_the_request_on_the_server(route, behind):

    def aborted():
        return sum(metric(url, 'request_success_total{finished_reason="abort"}') for _, url in behind)

    before = aborted()

    async def leave():
        async with aiohttp.ClientSession() as session:
            body = {"model": "tiny", "prompt": PROMPT, "stream": True, **GREEDY, "max_tokens": 1500}
            async with session.post(f"{route}/v1/completions", json=body) as response:
                await response.content.readline()
        for _ in range(6000):
            if await asyncio.to_thread(aborted) > before:
                return True
            await asyncio.sleep(0.1)
        return False

    assert asyncio.run(leave())


def test_streams_move_from_a_hung_server(routes, behind):
    """A hung server changes no output, even of requests with penalties. It gets requests again after it recovers."""
    route = routes(10)
    (whole,) = alone(behind[0][1], [PROMPT], max_tokens=300)
    (penalized,) = alone(behind[0][1], [PROMPT], max_tokens=300, **PENALTY)
    text = said(posted(behind[0][1], "/v1/completions", prompt=TEXT, max_tokens=300))[0][0]
    process = behind[0][0]

    ids, words = {"prompt": PROMPT, "return_token_ids": True}, {"prompt": TEXT}
    asking = [ids, ids | PENALTY, ids, ids | PENALTY, words, words]

    async def watch():
        going, outputs = asyncio.Event(), [[] for _ in asking]

        async def one(session, fields, output):
            body = {"model": "tiny", "stream": True, **GREEDY, "max_tokens": 300, **fields}
            async with session.post(f"{route}/v1/completions", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        output += choice.get("token_ids") or choice["text"]
                        if all(outputs):
                            going.set()

        async with aiohttp.ClientSession() as session:
            streams = [asyncio.create_task(one(session, *each)) for each in zip(asking, outputs, strict=True)]
            await going.wait()
            process.send_signal(signal.SIGSTOP)
            await asyncio.gather(*streams)
            assert metric(route, 'instance_state{instance="mixed-0",state="lost"}') == 1
            process.send_signal(signal.SIGCONT)
            while metric(route, 'instance_state{instance="mixed-0",state="up"}') == 0:
                # Several, so that the recovered server gets one too.
                again = await asyncio.gather(*(complete(session, route, PROMPT, **GREEDY) for _ in range(3)))
                assert again == [whole[:60]] * 3
        return outputs

    assert asyncio.run(asyncio.wait_for(watch(), 600)) == [whole, penalized] * 2 + [list(text)] * 2
    assert metric(route, "request_replays_total") > 0


def test_waits_for_servers_that_start_later(tiny_model_dir):
    model, port = tiny_model_dir("llama"), free_port()
    flags = ("--model", str(model), "--served-model-name", "tiny", "--colocated", f"http://127.0.0.1:{port}")

    async def wait_and_ask():
        async with aiohttp.ClientSession() as session:
            return await complete(session, url, PROMPT, **GREEDY)

    with ExitStack() as running:
        own = running_service(model, *ENGINE, "--colocated", "1", "--served-model-name", "tiny", port=port)
        running.enter_context(own)
        _, url = running.enter_context(running_service(None, *flags, program=ROUTE))
        assert len(asyncio.run(wait_and_ask())) == 60


def asked(url, path, body, **headers):
    """Return the status, the content type and the text of a response."""

    async def ask():
        async with aiohttp.ClientSession(headers=headers) as session, session.post(url + path, json=body) as response:
            return response.status, response.content_type, await response.text()

    return asyncio.run(ask())


def scored(text):
    """Return the parts of a response to a request with echo that do not differ between servers."""
    choices = [json.loads(line.removeprefix("data: "))["choices"] for line in text.splitlines() if '"choices"' in line]
    return [(each["text"], each["logprobs"]) for listed in choices for each in listed]


@pytest.mark.parametrize("streams", [False, True])
def test_what_the_gateway_cannot_do_itself_a_server_does(route, behind, streams):
    """Log probabilities of a prompt come from a server, to which the request goes as it is."""
    body = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2, "stream": streams}
    got, wanted = (asked(url, "/v1/completions", body | {"temperature": 0}) for url in (route, behind[0][1]))
    assert got[:2] == wanted[:2] == (200, "text/event-stream" if streams else "application/json")
    assert scored(got[2]) == scored(wanted[2])
    assert any(logprobs["token_logprobs"][-1] is not None for _, logprobs in scored(got[2]))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": PROMPT, "use_beam_search": True}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/embeddings", {"model": "tiny", "input": "a"}),
    ],
)
def test_a_server_s_refusal_is_passed_on(route, behind, path, body):
    got, wanted = (asked(url, path, body) for url in (route, behind[0][1]))
    assert got == wanted
    assert 400 <= got[0] < 500


def test_requests_for_another_model_are_refused(route):
    status, _, text = asked(route, "/v1/embeddings", {"model": "other", "input": "a"})
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")


def test_servers_that_are_gone_get_no_whole_requests(tiny_model_dir, behind):
    """If a server has gone, another one answers."""
    body = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0}
    model = tiny_model_dir("llama")
    with ExitStack() as running:
        flags = (*ENGINE, "--colocated", "1", "--served-model-name", "tiny")
        doomed, own = running.enter_context(running_service(model, *flags))
        servers = [flag for url in (own, behind[1][1]) for flag in ("--colocated", url)]
        gateway = running_service(None, "--model", str(model), "--served-model-name", "tiny", *servers, program=ROUTE)
        _, url = running.enter_context(gateway)
        assert asked(url, "/v1/completions", body)[0] == 200
        doomed.kill()
        doomed.wait()
        assert asked(url, "/v1/completions", body)[0] == 200
