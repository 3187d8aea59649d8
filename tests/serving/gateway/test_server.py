"""The HTTP server around the gateway."""

import asyncio
import signal
import socket

import pytest
from fastapi import FastAPI

from twofold.errors import ConfigurationError
from twofold.serving.gateway.server import HttpServer


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
