"""HTTP server of the gateway: uvicorn with limits on headers and connections."""

import asyncio
import contextlib
import gc
import logging
import resource
import socket
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from twofold.errors import ConfigurationError
from twofold.serving.gateway.gateway import RequestLimits
from twofold.serving.gateway.middleware import Departure
from twofold.serving.gateway.responses import error_response

log = logging.getLogger(__name__)

# Poll interval for startup; uvicorn has no event for it.
_POLL_S = 0.01
# Longer than usual client pauses, so that few requests hit a closing connection.
KEEP_ALIVE_S = 65
_RESERVED_FILES = 64  # for workers, files, and connections to the paths below
_PIPELINED = 16  # requests of a connection before the response to the first is complete
_PROBES = frozenset({b"/health", b"/ping", b"/metrics"})  # answered on any number of connections
_WARNING_INTERVAL_S = 60.0
_INTERIM = b"HTTP/1.1 100"
_COLLECTED = (2_000, 5, 10)  # objects, and collections of a younger generation, until the next collection
_CROWDED = error_response(503, "the service has no free connection; try again later", code="too_many_connections")
_CROWDED.headers["connection"] = "close"


class _HeadTooLargeError(Exception):
    """Raised to stop the parser when the request line and headers exceed the limit."""


class ConnectionTable:
    """The open connections of a server.

    If more than `most` are open, or more than `most_per_address` from one address, then each new one (from that
    address) replaces the oldest one without a running request.
    """

    def __init__(self, most: int, most_per_address: int = sys.maxsize) -> None:
        self.most, self.most_per_address = most, most_per_address
        self._open = 0
        self._open_from: Counter[str] = Counter()  # by address of the client
        # Connections without a running request, oldest first: all, and by address.
        self._idle: dict[BoundedProtocol, None] = {}
        self._idle_from: defaultdict[str, dict[BoundedProtocol, None]] = defaultdict(dict)
        self._warned_s = -_WARNING_INTERVAL_S

    def is_full(self, address: str) -> bool:
        """Return whether too many connections are open, in all or from this address."""
        return self._open > self.most or self._open_from[address] > self.most_per_address

    def add(self, connection: "BoundedProtocol") -> bool:
        """Add a new connection, and close an idle one if there are too many. Return False if none is idle."""
        address = connection.address
        self._open += 1
        self._open_from[address] += 1
        room = True
        if self._open_from[address] > self.most_per_address:
            self._warn(f"all {self.most_per_address} connections of {address} are open")
            room = self._close_first(self._idle_from[address])
        elif self._open > self.most:
            self._warn(f"all {self.most} connections are open (raise the limit on open files, ulimit -n, for more)")
            room = self._close_first(self._idle)
        self.rest(connection)
        return room

    def remove(self, connection: "BoundedProtocol") -> None:
        """Remove a closed connection."""
        address = connection.address
        self.work(connection)
        self._open -= 1
        self._open_from[address] -= 1
        if not self._open_from[address]:
            del self._open_from[address], self._idle_from[address]

    def rest(self, connection: "BoundedProtocol") -> None:
        """Record that a connection has no running request."""
        self._idle[connection] = self._idle_from[connection.address][connection] = None

    def work(self, connection: "BoundedProtocol") -> None:
        """Record that a connection has a running request."""
        self._idle.pop(connection, None)
        self._idle_from[connection.address].pop(connection, None)

    def _close_first(self, idle: "dict[BoundedProtocol, None]") -> bool:
        oldest = next(iter(idle), None)
        if oldest is None:
            return False
        self.work(oldest)
        oldest.transport.abort()
        return True

    def _warn(self, what: str) -> None:
        now = time.monotonic()
        if now - self._warned_s >= _WARNING_INTERVAL_S:
            self._warned_s = now
            log.warning("%s: new ones replace the oldest idle ones", what)


def connection_limit(files_per_connection: int) -> int:
    """Return how many connections may be open, if each needs as many files, within the limit of this process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (files - len(list(Path("/dev/fd").iterdir())) - _RESERVED_FILES) // files_per_connection)


class _HeadHolder:
    """Transport of one response. It sends the head with the first part of the body, in one system call."""

    __slots__ = ("_head", "_transport", "close", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.close, self.is_closing = transport, transport.close, transport.is_closing
        self._head: bytes | None = None  # empty once it is sent

    def write(self, data: bytes) -> None:
        if self._head is None and not data.startswith(_INTERIM):
            self._head = data
            return
        self._transport.write(self._head + data if self._head else data)
        self._head = self._head and b""


class BoundedProtocol(HttpToolsProtocol):
    """HTTP protocol for uvicorn that limits the size of a request's head, and the time until it is complete."""

    limits: RequestLimits
    table: ConnectionTable

    _in_head = False
    _too_large = False
    _received = 0
    _parsed = 0
    _deadline: asyncio.TimerHandle | None = None  # for a head
    _in_reserve = False  # opened while all other connections had running requests
    address = ""  # of the client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._cycles: deque[RequestResponseCycle] = deque()  # whose responses are incomplete
        self.address = self.client[0] if self.client else ""
        self._in_reserve = not self.table.add(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.table.remove(self)
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Data received while the head is incomplete belongs to it; its first bytes are counted when parsed.
        if self._in_head:
            self._received += len(data)
        super().data_received(data)
        if self._in_head and self._received > self.limits.header_bytes and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")
        elif self.cycle is not None and self.cycle.response_complete:
            self._expect_head()  # data between two requests has ended the keep-alive timeout

    def on_response_complete(self) -> None:
        _let_go(self._cycles.popleft())
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.table.rest(self)
        if self._in_head or (self.cycle.response_complete and self.cycle.more_body):
            self._expect_head()  # the body of a refused request is discarded

    def _abort(self) -> None:
        self.transport.abort()
        self._leave()

    def _write_part(self, part: bytes) -> bool:
        """Write a part of the body that has begun, without ASGI's messages. Return False if it must go through them."""
        cycle = self._cycles[0]
        if self.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        if part:  # a chunk of no bytes would end the body
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def _whole_body(self) -> bytes | None:
        """Take the body of the running request, without ASGI's messages. Return None unless all of it has arrived."""
        cycle = self._cycles[0]
        if cycle.more_body:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def _leave(self) -> None:
        for cycle in self._cycles:  # uvicorn marks the newest alone
            if not cycle.disconnected:
                cycle.disconnected = True
                cycle.message_event.set()
                cycle.scope["state"]["departure"].leave()
                _let_go(cycle)

    def _expect_head(self) -> None:
        """Close the connection unless a head is complete in time."""
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.limits.head_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

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
        self._stop_waiting()
        if self.transport.is_closing():
            return
        self.table.work(self)
        self.scope["state"] |= {
            "abort": self._abort,  # for clients that do not read
            "departure": Departure(),
            "whole_body": self._whole_body,
            "write": self._write_part,
        }
        crowded = self._in_reserve and self.table.is_full(self.address)
        probes = self.url.partition(b"?")[0] in _PROBES
        self.app = _CROWDED if crowded and not probes else self.config.loaded_app
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # its response has no body
            self.cycle.transport = cast(asyncio.Transport, _HeadHolder(self.transport))
        self._cycles.append(self.cycle)
        if len(self._cycles) > _PIPELINED:
            self.transport.abort()
        elif len(self._cycles) > 1:
            self.flow.resume_reading()  # uvicorn pauses it, which would hide a disconnect from the running request

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if len(self._cycles) > 1 and self.flow.read_paused:  # a large body waits behind the running request
            self.transport.abort()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.flow.resume_reading()  # uvicorn pauses it behind a large body, which would hide a disconnect

    def send_400_response(self, msg: str) -> None:
        """Reject invalid HTTP (status 400) or too large headers (status 431), and close the connection.

        While an earlier request of the connection runs, only close it: the answer would be a part of that response.
        """
        if self._cycles:
            self.transport.abort()
            return
        if self._too_large:
            most = self.limits.header_bytes
            refused = error_response(431, f"the headers exceed the limit of {most} bytes", code="headers_too_large")
        else:
            refused = error_response(400, msg or "invalid HTTP", code="invalid_http")
        body = bytes(refused.body)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[refused.status_code] + head + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > self.limits.header_bytes:
            self._too_large = True
            raise _HeadTooLargeError


def _let_go(cycle: RequestResponseCycle) -> None:
    """Delete the references from a request to its connection: such cycles would wait for a garbage collection."""
    for name in ("abort", "whole_body", "write"):
        cycle.scope["state"].pop(name, None)


class HttpServer:
    """Serves an ASGI application on a bound socket. Does not change signal handlers."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        grace_s: int = 30,
        limits: RequestLimits | None = None,
        files_per_connection: int = 1,
    ) -> None:
        self._socket = sock
        self._task: asyncio.Task[None] | None = None
        limits = limits or RequestLimits()
        most = limits.connections or connection_limit(files_per_connection)
        table = ConnectionTable(most, limits.connections_per_address or sys.maxsize)
        protocol = type("BoundedProtocol", (BoundedProtocol,), {"limits": limits, "table": table})
        self._server = _Server(
            uvicorn.Config(
                app,
                http=protocol,  # a class
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # no endpoint uses the address of the client
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=grace_s,
            )
        )

    async def start(self) -> None:
        """Start serving; return once connections are accepted. Raises ConfigurationError on failure."""
        # A collection of all objects stops every stream for up to 100 ms, and the objects so far stay.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_COLLECTED)
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
        """Stop accepting connections. Wait up to `grace_s` seconds for running responses, then cancel the rest."""
        self._server.should_exit = True
        await self.wait()
        # uvicorn cancels remaining tasks after the grace period but does not wait for them.
        cancelled = set(self._server.server_state.tasks)
        if cancelled:
            await asyncio.wait(cancelled)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Override uvicorn's method, so that the process keeps its own signal handlers."""
        yield
