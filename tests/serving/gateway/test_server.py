"""The HTTP server around the gateway."""

import asyncio
import signal
import socket

import pytest
from fastapi import FastAPI

from twofold.errors import ConfigurationError
from twofold.serving.gateway.server import HttpServer

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


def test_starts_and_stops():
    """The server accepts connections from start to stop and does not change signal handlers."""

    async def scenario():
        sock = socket.create_server(("127.0.0.1", 0))
        address = sock.getsockname()
        server = HttpServer(FastAPI(), sock)
        before = signal.getsignal(signal.SIGINT)
        await server.start()
        assert signal.getsignal(signal.SIGINT) is before
        _, writer = await asyncio.open_connection(*address)
        writer.close()
        await server.stop()
        await server.wait()
        with pytest.raises(OSError):  # noqa: PT011 the type depends on the system
            await asyncio.open_connection(*address)

    asyncio.run(scenario())


def test_start_fails_on_an_unusable_socket():
    sock = socket.create_server(("127.0.0.1", 0))
    sock.close()
    with pytest.raises(ConfigurationError, match="could not be started"):
        asyncio.run(HttpServer(FastAPI(), sock).start())


def test_stopping_before_start_does_nothing():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        asyncio.run(HttpServer(FastAPI(), sock).stop())


async def echo(_scope, receive, send):
    body = (await receive())["body"]
    await send(START)
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"end"})


async def fails_after_the_head(_scope, _receive, send):
    await send(START)
    raise ValueError("a defect of an endpoint")


def exchange(app, request):
    """Send a request, and its body after an interim response; return the bytes of both responses."""

    async def scenario():
        sock = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(app, sock)
        await server.start()
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(request)
        received = b""
        if b"Expect" in request:
            received = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"body")
        received += await reader.read()
        writer.close()
        await server.stop()
        return received

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "more", "begins", "ends"),
    [
        ("POST", "Content-Length: 0", b"HTTP/1.1 200", b"\r\n\r\n3\r\nend\r\n0\r\n\r\n"),
        ("HEAD", "Content-Length: 0", b"HTTP/1.1 200", b"close\r\n\r\n"),
        ("POST", "Expect: 100-continue\r\nContent-Length: 4", b"HTTP/1.1 100", b"4\r\nbody\r\n3\r\nend\r\n0\r\n\r\n"),
    ],
)
def test_a_head_is_sent_once_whatever_follows(method, more, begins, ends):
    received = exchange(echo, f"{method} / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}\r\n\r\n".encode())
    assert received.startswith(begins)
    assert received.endswith(ends)
    assert received.count(b"HTTP/1.1 200") == 1


def test_a_response_without_a_body_closes_the_connection():
    assert exchange(fails_after_the_head, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == b""
