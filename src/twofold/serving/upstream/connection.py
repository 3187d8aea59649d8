"""HTTP/1.1 connections to one server. A general HTTP client would cost more for each token than all else."""

import asyncio
import ssl
import sys
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools

CONNECT_S = 5.0
_HELD_BYTES = 1 << 16  # of an answer that is not read yet, until the server has to wait
_SIZES = frozenset({"content-length", "transfer-encoding"})


class ServerConnection(asyncio.Protocol):
    """A connection to a server, which carries one request at a time.

    Methods that wait raise ConnectionError if the connection ends, or the server sends invalid HTTP.
    """

    _transport: asyncio.Transport
    _loop: asyncio.AbstractEventLoop
    _parser: httptools.HttpResponseParser

    def __init__(self) -> None:
        self.status = 0  # of the answer; 0 before it arrives
        self.headers: dict[str, str] = {}  # of the answer, by name in lower case
        self.answered = False  # whether any byte of an answer has arrived
        self.reusable = True
        self._complete = True
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # callback of the parser
        self._holds = False  # whether the server has to wait
        self._error: Exception | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request. The answer to the request before must be complete."""
        self.status, self.headers, self.answered, self._complete = 0, {}, False, False
        self._transport.writelines((head, body))

    async def head(self) -> None:
        """Wait until the head of the answer has arrived."""
        while not self.status and not self._complete:
            await self._wait()

    async def read(self) -> bytes:
        """Wait for the body, and return all of it that has arrived; empty at its end."""
        while not self._parts and not self._complete:
            await self._wait()
        return self._take()

    async def read_all(self, most_bytes: int = sys.maxsize) -> bytes:
        """Return the rest of the body, up to about `most_bytes`."""
        parts, size = list[bytes](), 0
        while size < most_bytes and (part := await self.read()):
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    async def pour(self, sink: Callable[[bytes], None]) -> None:
        """Call `sink` with the body as it arrives, until its end. Raises the exceptions of `sink`, too."""
        if self._parts:
            sink(await self.read())
        self._sink = sink  # called without a switch to this task
        try:
            while not self._complete or self._error is not None:
                await self._wait()
        finally:
            self._sink = None

    def release(self) -> bool:
        """End the use of the connection for a request. Close it unless it can carry another; return whether it can."""
        if not self._complete or not self.reusable or self._parts:
            self._transport.abort()
            self.reusable = False
        return self.reusable

    def abort(self) -> None:
        self.reusable = False
        self._transport.abort()

    def _take(self) -> bytes:
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._holds:
            self._holds = False
            self._transport.resume_reading()
        return body

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, reason: str) -> None:
        self.reusable = False
        self._error = self._error or ConnectionError(reason)

    # -- callbacks of the transport and of the parser ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        if self._complete:  # an answer to no request
            self.abort()
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
            if self._sink is not None and self._parts:
                self._sink(self._take())
            elif not self._holds and sum(map(len, self._parts)) > _HELD_BYTES:
                self._holds = True
                self._transport.pause_reading()
        except httptools.HttpParserError as error:
            self._fail(f"invalid HTTP: {error}")
        except Exception as error:  # noqa: BLE001  raised again in `pour`
            self.reusable, self._error = False, error
        if self._error is not None:
            self._transport.abort()
        if self._sink is None or self._complete or self._error is not None:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self.status and exc is None and not _SIZES.intersection(self.headers):
            self._complete = True  # the end of the connection is the end of the body
        elif not self._complete:
            self._fail("the server closed the connection" if exc is None else str(exc))
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0  # an interim answer precedes the answer

    def on_message_complete(self) -> None:
        if self.status:
            self._complete = True
            self.reusable = self.reusable and self._parser.should_keep_alive()


class ConnectionPool:
    """Connections to the server at `url`, which are used again. Each request has the server's API key, if any."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._ssl else 80)
        self._path = parts.path.rstrip("/")
        own = {"host": parts.netloc.rpartition("@")[2]}
        if api_key is not None:
            own["authorization"] = f"Bearer {api_key}"
        self._own = frozenset(own)
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in own.items())
        self._idle: list[ServerConnection] = []

    async def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> ServerConnection:
        """Send a request. Return its connection once the answer's head has arrived. Raises OSError and TimeoutError."""
        given = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if name not in self._own)
        length = f"content-length: {len(body)}\r\n\r\n"
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{given}{self._fields}{length}".encode("latin-1")
        idle = self._reused()
        if idle is not None:
            try:
                return await self._send(idle, head, body)
            except ConnectionError:
                if idle.answered:
                    raise
                # The server has closed an idle connection just as this request used it.
        return await self._send(await self._connect(), head, body)

    def release(self, connection: ServerConnection) -> None:
        """End a request, complete or not."""
        if connection.release():
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _reused(self) -> ServerConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> ServerConnection:
        async with asyncio.timeout(CONNECT_S):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(ServerConnection, self._host, self._port, ssl=self._ssl)
        return connection

    async def _send(self, connection: ServerConnection, head: bytes, body: bytes) -> ServerConnection:
        try:
            connection.send(head, body)
            await connection.head()
        except BaseException:
            connection.abort()
            raise
        return connection
