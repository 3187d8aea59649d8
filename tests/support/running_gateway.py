"""A gateway on a real socket, which runs in a thread with its own event loop."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from starlette.types import ASGIApp

from support.scripted_service import ScriptedService
from support.tokenizers_for_tests import byte_level
from twofold.serving.gateway.app import GatewaySettings, create_app
from twofold.serving.gateway.gateway import RequestLimits
from twofold.serving.gateway.keys import KeyRing
from twofold.serving.gateway.server import HttpServer
from twofold.serving.gateway.tokenizer import TextTokenizer
from twofold.serving.gateway.tools.families import BY_CHECKPOINT, AnswerParsers


@contextmanager
def running_app(app: ASGIApp, limits: RequestLimits | None = None) -> Iterator[str]:
    """Serve `app` while the context is open, and yield its base URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    up = threading.Event()
    down: list[asyncio.Event] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        server = HttpServer(app, sock, grace_s=1, limits=limits)
        await server.start()
        down.append(asyncio.Event())
        loops.append(asyncio.get_running_loop())
        up.set()
        await down[0].wait()
        await server.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert up.wait(600)
        yield url
    finally:
        loops[0].call_soon_threadsafe(down[0].set)
        thread.join()


@contextmanager
def running_gateway(
    service: ScriptedService,
    *,
    tokenizer: bool | TextTokenizer = True,
    keys: KeyRing | None = None,
    limits: RequestLimits | None = None,
    parsers: AnswerParsers = BY_CHECKPOINT,
) -> Iterator[httpx.Client]:
    """Run a gateway in front of `service`, and yield an HTTP client of the gateway."""
    own = byte_level() if tokenizer is True else tokenizer or None
    settings = GatewaySettings(keys=keys, limits=limits or RequestLimits(), parsers=parsers)
    app = create_app(service, own, settings)
    with running_app(app, limits) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client
