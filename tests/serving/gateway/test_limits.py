"""Limits on headers, bodies, prompts and counts."""

import asyncio
import socket

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService
from twofold.serving.gateway import gateway, output
from twofold.serving.gateway.gateway import RequestLimits
from twofold.serving.gateway.tokenizer import TextTokenizer

LIMITS = RequestLimits(header_bytes=2000, prompt_tokens=5, prompt_characters=40)


@pytest.fixture(scope="module")
def client():
    with running_gateway(ScriptedService(), limits=LIMITS) as client:
        yield client


def exchange(client, *parts):
    """Send raw HTTP bytes; return the status code, the header bytes and the text after the header."""
    address = (client.base_url.host, client.base_url.port)
    with socket.create_connection(address, timeout=600) as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server closed early
        received = b""
        while data := sock.recv(65536):
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, body.decode()


LINE = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        (LINE + b"X: " + b"a" * 3000 + b"\r\n\r\n",),
        # Sent at once: data in flight when the server closes could reset the connection and lose the response.
        (LINE + b"X: 1\r\n" * 1000 + b"\r\n",),
        (LINE + b"A" * 3000 + b": 1\r\n\r\n",),
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",),
    ],
)
def test_rejects_large_headers(client, parts):
    """A long header value, many headers, a long header name and a long path each get a 431 with an error JSON."""
    status, head, body = exchange(client, *parts)
    assert status == 431
    assert b"application/json" in head
    assert '"headers_too_large"' in body


def test_rejects_endless_headers_while_they_arrive(client):
    """The server closes the connection as soon as the headers exceed the limit."""
    address = (client.base_url.host, client.base_url.port)
    with socket.create_connection(address, timeout=600) as sock:
        sock.sendall(LINE + b"X: ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.sendall(b"a" * 100_000_000)
    assert client.get("/health").status_code == 200


def test_header_limit_is_per_request_and_excludes_the_body(client):
    body = b'{"model": "tiny", "prompt": [1], "max_tokens": 1, "user": "' + b"u" * 5000 + b'"}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    big = LINE + b"X: " + b"a" * 1800 + b"\r\n\r\n"
    for parts in ((post + body + big,), (post, body, big), [bytes([byte]) for byte in post + body + big]):
        status, _, rest = exchange(client, *parts)
        assert status == 200
        assert rest.count("HTTP/1.1 200") == 1


def test_invalid_http_is_400(client):
    status, _, body = exchange(client, b"\x16\x03\x01 hello\r\n\r\n")
    assert status == 400
    assert '"invalid_http"' in body


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": [1] * 5}, 200),
        ({"prompt": [1] * 6}, 400),
        ({"prompt": [[1] * 5, [1] * 6]}, 400),
        ({"prompt": "a" * 41}, 400),
        ({"prompt": "The quick brown fox jumps over"}, 400),
    ],
)
def test_rejects_long_prompts(client, fields, status):
    """Prompts are limited in characters before tokenization, and in tokens after it."""
    response = client.post("/v1/completions", json={"model": "tiny", "max_tokens": 1, **fields})
    assert response.status_code == status
    if status == 400:
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "prompt_too_long")


@pytest.mark.parametrize("content", ["a" * 41, "The quick brown fox"])
def test_rejects_long_messages(client, content):
    """Tokens of the chat template count towards the prompt limit."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "prompt_too_long"


FEW = RequestLimits(
    body_containers=40, body_values=60, messages=3, tools=1, generations=4, generated_prompt_tokens=8, stop_searches=5
)
HI = {"role": "user", "content": "Hi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hi"}] * 3}
TOOL = {"type": "function", "function": {"name": "f"}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {}}


@pytest.fixture(scope="module")
def few():
    with running_gateway(ScriptedService(), limits=FEW) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [
        ("/v1/completions", {"prompt": [[1]] * 45}, "40"),
        ("/v1/completions", {"prompt": [1] * 70}, "60"),
        ("/v1/completions", {"prompt": ["a"] * 5}, "4"),
        ("/v1/completions", {"prompt": [[1] * 3] * 3}, "8"),
        ("/v1/completions", {"prompt": [1] * 5, "n": 2}, "8"),
        ("/v1/completions", {"prompt": ["a"] * 3, "stop": ["x", "y"]}, "5"),
        ("/v1/chat/completions", {"messages": [HI] * 4}, "3"),
        ("/v1/chat/completions", {"messages": [PARTS]}, "3"),
        ("/v1/chat/completions", {"messages": [HI], "tools": [TOOL] * 2}, "1"),
        ("/v1/messages", {"messages": [HI] * 4, "max_tokens": 1}, "3"),
        ("/v1/messages", {"messages": [HI], "max_tokens": 1, "tools": [ANTHROPIC_TOOL] * 2}, "1"),
        ("/v1/messages/count_tokens", {"messages": [HI] * 4}, "3"),
        ("/v1/responses", {"input": [HI] * 4}, "3"),
        ("/tokenize", {"messages": [HI] * 4}, "3"),
    ],
)
def test_rejects_large_counts(few, path, fields, limit):
    """The error names the limit that a request exceeds."""
    refused = few.post(path, json={"model": "tiny", **fields})
    assert refused.status_code == 400
    assert f"limit of {limit}" in refused.json()["error"]["message"]


def test_detokenizes_no_more_tokens_than_the_context(client):
    assert client.post("/detokenize", json={"tokens": [5] * 256}).status_code == 200
    assert client.post("/detokenize", json={"tokens": [5] * 257}).json()["error"]["code"] == "context_length_exceeded"


def on_the_loop():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.fixture
def calls(monkeypatch):
    """Return a function that records for each call of an attribute whether it runs on an event loop."""

    def record(owner, name):
        function, made = getattr(owner, name), []

        def recorded(*args, **kwargs):
            made.append(on_the_loop())
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)
        return made

    return record


@pytest.mark.parametrize(("count", "inline"), [(1, True), (100, False)])
def test_many_empty_messages_are_rendered_in_a_thread(calls, count, inline):
    made = calls(TextTokenizer, "render_chat")
    with running_gateway(ScriptedService()) as client:
        messages = [{"role": "user", "content": ""}] * count
        client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 1})
    assert made == [inline]


def test_many_short_prompts_are_encoded_in_a_thread(calls):
    made = calls(TextTokenizer, "encode_one")
    with running_gateway(ScriptedService()) as client:
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": ["a"] * 200, "max_tokens": 1})
    assert answer.status_code == 200
    assert made == [False] * 200


@pytest.mark.parametrize(("size", "inline"), [(1000, True), (300_000, False)])
def test_large_bodies_are_decoded_in_a_thread(calls, size, inline):
    made = calls(gateway, "_decode")
    with running_gateway(ScriptedService()) as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "user": "u" * size}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert made == [inline]


def test_stop_strings_are_prepared_once(monkeypatch):
    prepared = []

    class Counted(output.StopPattern):
        def __init__(self, text):
            prepared.append(text)
            super().__init__(text)

    monkeypatch.setattr(output, "StopPattern", Counted)
    with running_gateway(ScriptedService()) as client:
        body = {"model": "tiny", "prompt": ["a", "b"], "n": 8, "stop": ["xyz", "zzz"], "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert sorted(prepared) == ["xyz", "zzz"]
