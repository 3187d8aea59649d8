"""`twofold route` in front of scripted servers that refuse requests, name addresses in errors, or send without end."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import aiohttp
import psutil
import pytest

from support.api_client import metric
from support.running_service import ROUTE, running_service
from support.scripted_endpoint import DONE, Drop, Flood, Refuse, Send, SendUntilProbed, endpoint, event

ADDRESSES = "http://gpu7.internal:9000/v1, 10.1.2.3:5557, [fd00::7]:80 and localhost:8000"
SECRETS = ("gpu7", "10.1.2.3", "fd00", "8000", "127.0.0.1")
ERROR = json.dumps({"error": {"message": f"it broke at {ADDRESSES}", "code": 17}}).encode()


def choice(*tokens, finish=None):
    return Send(event(choices=[{"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish}]))


# By the first token of a prompt, or by the input of a request that is forwarded.
SCRIPTS = {
    2: [Refuse(500, ERROR)],
    3: [Refuse(429, ERROR)],
    4: [Refuse(503, ERROR)],
    5: [Refuse(400, ERROR)],
    6: [choice(7, finish="length"), Send(DONE)],
    7: [Refuse(307, ERROR)],
    8: [choice(-7, finish="length"), Send(DONE)],
    10: [Send(b"data: " + b"[" * 200_000 + b"]" * 200_000 + b"\n\n")],
    11: [choice(2**32 - 1, finish="length"), Send(DONE)],
    "g": [Send(b'data: {"choices":[{"index":0,"text":"x","prompt_token_ids":[1,,"2"],"token_ids":[7]}]}\n\n'), Drop()],
    "500": [Refuse(500, ERROR)],
    "429": [Refuse(429, ERROR)],
    "401": [Refuse(401, ERROR)],
    "400": [Refuse(400, ERROR)],
    "broken": [Send(b"data: {}\n\n"), Drop()],
    "error": [Send(b"data: {}\n\ndata: " + ERROR + b"\n\n")],
    "flood": [Flood(b"data: " + b"x" * 65536 + b"\n\n")],
}


class Arrivals:
    """A script that records when each kind of request arrives."""

    def __init__(self):
        self.times = {}

    def __call__(self, body):
        kind = body["input"] if "input" in body else body["prompt"][0]
        self.times.setdefault(kind, []).append(time.monotonic())
        return SCRIPTS[kind]


@contextmanager
def route(tiny_model_dir, servers, *flags, log="/dev/null"):
    model = str(tiny_model_dir("llama"))
    urls = [flag for server in servers for flag in ("--colocated", server.url.replace("127.0.0.1", "localhost"))]
    flags = ("--model", model, "--served-model-name", "tiny", *urls, *flags)
    with running_service(None, *flags, program=ROUTE, log=log) as (process, url):
        yield process, url


@pytest.fixture(scope="module")
def hostile(tiny_model_dir, tmp_path_factory):
    """Yield the URL of a gateway, its log, and the arrivals of requests at its two servers."""
    log = tmp_path_factory.mktemp("hostile") / "log"
    arrivals = [Arrivals(), Arrivals()]
    with ExitStack() as running:
        servers = [running.enter_context(endpoint(each)) for each in arrivals]
        _, url = running.enter_context(route(tiny_model_dir, servers, log=log))
        while metric(url, 'instance_state{instance="mixed-1",state="up"}') == 0:
            pass
        yield url, log, arrivals


def ask_all(url, *asks):
    """Send requests at once, and return the status and the text of each response."""

    async def ask(session, path, fields):
        async with session.post(url + path, json={"model": "tiny", **fields}) as response:
            return response.status, await response.text()

    async def ask_each():
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(ask(session, path, fields) for path, fields in asks))

    return asyncio.run(ask_each())


def completion(token):
    return "/v1/completions", {"prompt": [token, 9], "max_tokens": 1}


def forwarded(kind):
    return "/v1/embeddings", {"input": kind}


def error(text):
    """Return the error of a response, which names no address."""
    assert not [secret for secret in SECRETS if secret in text]
    return json.loads(text)["error"]


def test_a_request_that_is_always_refused_takes_no_server_out_of_service(hostile):
    """Its attempts alternate between the servers, with growing delays, and its error is plain."""
    url, log, arrivals = hostile
    failed, full, not_ready = (502, "server_failed"), (429, "server_full"), (503, "server_not_ready")
    tokens = {2: failed, 3: full, 4: not_ready, 7: failed, 8: failed, 10: failed}
    answers = ask_all(url, *map(completion, tokens))
    for token, expected, (status, text) in zip(tokens, tokens.values(), answers, strict=True):
        said = error(text)
        assert (status, said["code"]) == expected
        assert said["message"].startswith("mixed-")
        assert said["type"] == ("rate_limit_error" if status == 429 else "server_error")
        times = sorted(arrivals[0].times[token] + arrivals[1].times[token])
        assert [len(each.times[token]) for each in arrivals] == [4, 4]
        # The delays are 0.1 s · 2ⁿ from the start of an iteration of the event loop, which may be long on a busy host.
        assert all(after - before >= 0.05 * 2**number for number, (before, after) in enumerate(pairwise(times)))
    for number in range(2):
        assert metric(url, f'instance_state{{instance="mixed-{number}",state="up"}}') == 1
        assert metric(url, f'worker_restarts_total{{instance="mixed-{number}"}}') == 0
    assert [status for status, _ in ask_all(url, completion(6), completion(11))] == [200, 200]
    assert ADDRESSES in Path(log).read_text()


def test_a_rejected_request_keeps_the_server_s_message(hostile):
    ((status, text), (direct, body)) = ask_all(hostile[0], completion(5), forwarded("400"))
    assert (status, direct) == (400, 400)
    hidden = "it broke at [address] [address], [address] and [address]"
    assert error(text)["message"] == error(body)["message"] == hidden
    assert error(body)["code"] == 17


@pytest.mark.parametrize(("kind", "status"), [("500", 502), ("429", 429), ("401", 502)])
def test_forwarded_requests_get_plain_errors_after_every_server_has_refused(hostile, kind, status):
    url, _, arrivals = hostile
    ((got, text),) = ask_all(url, forwarded(kind))
    assert got == status
    assert error(text)["message"].startswith("mixed-")
    assert [len(each.times[kind]) for each in arrivals] == [1, 1]


@pytest.mark.parametrize(("kind", "says"), [("broken", "was lost"), ("error", "it broke at [address]")])
def test_forwarded_streams_end_with_a_plain_error(hostile, kind, says):
    ((status, text),) = ask_all(hostile[0], forwarded(kind))
    assert status == 200
    assert says in error(text.strip().split("\n\n")[-1].removeprefix("data: "))["message"]


def kernel_bytes():
    """Return the most bytes that the kernel may hold of a stream from a server to a client that does not read."""
    sent, received = (int(Path(f"/proc/sys/net/ipv4/tcp_{kind}mem").read_text().split()[2]) for kind in "wr")
    return 2 * sent + received


def test_garbled_token_ids_of_a_prompt_end_one_request(hostile):
    """They are needed when the stream breaks; then the service goes on."""
    url, _, _ = hostile
    garbled = "/v1/completions", {"prompt": "garbled", "max_tokens": 9}
    ((status, text),) = ask_all(url, garbled)
    assert (status, error(text)["code"]) == (503, "instance_lost")
    assert ask_all(url, completion(6))[0][0] == 200


def test_a_server_that_sends_tokens_may_answer_probes_late(tiny_model_dir):
    """It keeps its request; without tokens, the next unanswered probe takes it out of service."""
    steps = [SendUntilProbed(choice(7).data, 3), choice(8, finish="stop"), Send(DONE)]
    with endpoint(lambda _: steps) as server, route(tiny_model_dir, [server], "--probe-timeout", "2") as (_, url):
        server.stalls = True
        ((status, text),) = ask_all(url, ("/v1/completions", {"prompt": [3], "max_tokens": 200}))
        assert (status, json.loads(text)["choices"][0]["finish_reason"]) == (200, "stop")
        assert len(server.bodies) == 1
        while metric(url, 'instance_state{instance="mixed-0",state="up"}'):
            pass


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json"])
def test_an_answer_that_is_not_read_is_bounded_and_ends_at_the_deadline(tiny_model_dir, content_type):
    """Both connections end, of the client and of the server."""
    body = b'{"model":"tiny","input":"flood"}'
    with ExitStack() as running:
        server = running.enter_context(endpoint(Arrivals(), content_type=content_type))
        process, url = running.enter_context(route(tiny_model_dir, [server], "--request-timeout", "2"))
        client = running.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        assert server.ended.acquire(timeout=600)
        assert server.flooded_bytes < kernel_bytes() + 2**22
        own = client.getsockname()[1]
        for _ in range(6000):
            connections = psutil.Process(process.pid).net_connections("tcp")
            if not any(each.raddr and each.raddr.port == own for each in connections):
                return
            time.sleep(0.1)
        pytest.fail("the connection of the client is still open")
