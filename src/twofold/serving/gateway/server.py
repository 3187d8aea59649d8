"""HTTP on a connection, with a bound on headers and with errors in the form that the API gives them.

The gateway's HTTP server, on a socket that is bound already and on a loop that runs already.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from twofold.errors import ConfigurationError
from twofold.serving.gateway.errors import error_response
from twofold.serving.gateway.gateway import RequestLimits


class _HeadTooLargeError(Exception):
    """Ends the parsing of a request whose head is over the bound."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a request whose request line and headers together exceed `header_bytes`; make one with `bounded`.

    The parser itself takes any number of headers and a header of any length.
    """

    header_bytes: int

    _in_head = False
    _too_large = False
    _received = 0
    _parsed = 0

    def data_received(self, data: bytes) -> None:
        # What came while the head was incomplete belongs to it; the bytes in which it begins are counted as parsed.
        if self._in_head:
            self._received += len(data)
        super().data_received(data)
        if self._in_head and self._received > self.header_bytes and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._in_head = True
        self._received = self._parsed = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Called where the bytes are no HTTP, and for what is too large."""
        if self._too_large:
            most = self.header_bytes
            refused = error_response(
                431, f"the headers are larger than the {most} bytes taken here", code="headers_too_large"
            )
        else:
            refused = error_response(400, msg or "this is not HTTP", code="invalid_http")
        body = msgspec.json.encode(refused.body)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[refused.status] + head + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > self.header_bytes:
            self._too_large = True
            raise _HeadTooLargeError


def bounded(header_bytes: int) -> type[BoundedProtocol]:
    """The protocol with its bound: the server makes instances of it with arguments of its own."""
    return type("BoundedProtocol", (BoundedProtocol,), {"header_bytes": header_bytes})


# How often to look whether the server is up; it offers nothing to wait on.
_POLL_S = 0.01
# Longer than the pauses of usual clients, so that few of them meet a connection as it closes.
KEEP_ALIVE_S = 65


class HttpServer:
    """Serves an application until told to stop. Signals are the caller's business.

    server = HttpServer(app, bound_socket)
    await server.start()          # returns when connections are taken
    await server.stop()           # running answers may end, within `grace_s`
    """

    def __init__(
        self, app: ASGIApp, sock: socket.socket, *, grace_s: int = 30, limits: RequestLimits | None = None
    ) -> None:
        """After `grace_s` seconds of stopping, running answers are cancelled. Of `limits`, it takes `header_bytes`."""
        self._socket = sock
        self._task: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=bounded((limits or RequestLimits()).header_bytes),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=grace_s,
            )
        )

    async def start(self) -> None:
        """Raises ConfigurationError where the server cannot be started."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                raise ConfigurationError("the HTTP server could not be started") from self._task.exception()
            await asyncio.sleep(_POLL_S)

    async def wait(self) -> None:
        """Wait until the server has stopped."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Take no more connections, let running answers end and wait for that."""
        self._server.should_exit = True
        await self.wait()
        # The server cancels what is left when the grace is over, but does not wait for it.
        cancelled = set(self._server.server_state.tasks)
        if cancelled:
            await asyncio.wait(cancelled)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield
