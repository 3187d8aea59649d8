"""Limits on headers, bodies and prompts."""

import socket

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService
from twofold.serving.gateway.gateway import RequestLimits

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
