"""A gateway process: serves HTTP on the socket of the service, whose requests run in the service's own process.

Requests that concern the state of the service are passed on to the service's own gateway.
"""

import asyncio
import signal
import socket
from pathlib import Path

import msgspec
import uvloop
from fastapi.responses import Response
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from twofold.errors import InstanceLostError
from twofold.request import Generation
from twofold.serving.controller.live_request import OutputSink
from twofold.serving.controller.service import ServedModel
from twofold.serving.fronts.link import FROM_SERVICE, Begin, Finish, GatewayLink, Produced, ServiceReady
from twofold.serving.gateway.app import GatewaySettings, create_front
from twofold.serving.gateway.gateway import BodyReader
from twofold.serving.gateway.server import HttpServer
from twofold.serving.gateway.streaming import unless_disconnected
from twofold.serving.gateway.tokenizer import load_tokenizer
from twofold.serving.launch.child_process import set_title
from twofold.serving.telemetry.context import CURRENT
from twofold.serving.telemetry.logs import configure_logs
from twofold.serving.upstream.connection import ConnectionPool

READ_GRACE_S = 2  # for clients to read the last output
# Of one connection, or set anew by each gateway.
_OWN_REQUEST = frozenset({"host", "connection", "content-length", "transfer-encoding", "expect", "x-request-id"})
_OWN_RESPONSE = frozenset({"connection", "content-length", "transfer-encoding", "date", "x-request-id", "traceparent"})

_Sent = tuple[str, str, bytes, dict[str, str]]  # method, path, body and headers


class DoorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway processes of a service, and the facts of the service that they need.

    With `forwards`, servers behind the service answer the requests that it does not support.
    """

    settings: GatewaySettings
    processes: int
    tokenizer: Path | None
    forwards: bool = False
    files_per_connection: int = 1
    log_format: str = "text"


class FrontConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a gateway process: the service's Unix socket, and the URL of the service's own gateway."""

    socket: str
    url: str
    door: DoorConfig


def run_front(config: FrontConfig, listener: socket.socket) -> None:
    """Serve until SIGTERM, or until the service ends."""
    set_title("gateway")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the service, too
    configure_logs(config.door.log_format)
    uvloop.run(_run(config, listener))


async def _run(config: FrontConfig, listener: socket.socket) -> None:
    door = config.door
    tokenizer = load_tokenizer(door.tokenizer)
    service, limits = RemoteService(), door.settings.limits
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.lost.set)
    await service.connect(config.socket)
    relay = Relay(config.url, BodyReader(limits))
    app = create_front(service, tokenizer, door.settings, relay, relay if door.forwards else None)
    server = HttpServer(
        app, listener, grace_s=READ_GRACE_S, limits=limits, files_per_connection=door.files_per_connection
    )
    await server.start()
    await service.lost.wait()
    await server.stop()
    relay.close()


class RemoteService:
    """A service in another process. All requests fail, and `lost` is set, if that process ends."""

    def __init__(self) -> None:
        self._link = GatewayLink(self._receive, self._gone)
        self._sinks: dict[str, OutputSink] = {}
        self._ready: asyncio.Future[ServiceReady] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()

    async def connect(self, path: str) -> None:
        """Connect to the Unix socket of the service, and wait for its first message. Raises OSError."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._link, path)
        await self._ready

    @property
    def model(self) -> ServedModel:
        return self._ready.result().model

    @property
    def takes_text(self) -> bool:
        return self._ready.result().takes_text

    def submit(self, generation: Generation, sink: OutputSink) -> None:
        """Run a request (see `Service.submit`). A refusal is a failure of the request."""
        self._sinks[generation.request.id] = sink
        self._link.send(Begin(generation=generation, context=CURRENT.get()))

    def stop(self, request_id: str) -> None:
        """End a request as complete."""
        self._finish(request_id, complete=True)

    def abort(self, request_id: str) -> None:
        """Abort a request, unless it has ended."""
        self._finish(request_id, complete=False)

    def _finish(self, request_id: str, *, complete: bool) -> None:
        if self._sinks.pop(request_id, None) is not None:
            self._link.send(Finish(request_id=request_id, complete=complete))

    def _receive(self, line: bytes) -> None:
        message = FROM_SERVICE.decode(line)
        if isinstance(message, ServiceReady):
            self._ready.set_result(message)
            return
        sink = self._sinks.get(message.request_id)
        if sink is None:
            return
        if isinstance(message, Produced):
            if message.output.finish_reason is not None:
                del self._sinks[message.request_id]
            sink.output(message.output)
        else:
            del self._sinks[message.request_id]
            sink.failed(message.error())

    def _gone(self) -> None:
        self.lost.set()
        for sink in self._sinks.values():
            sink.failed(InstanceLostError("the service has ended"))
        self._sinks.clear()


class Relay:
    """ASGI application, and forwarder of whole requests, to the gateway at `url`."""

    def __init__(self, url: str, bodies: BodyReader) -> None:
        self._pool, self._bodies = ConnectionPool(url), bodies

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await self.answer(request, await self._bodies.read(request))(scope, receive, send)

    def answer(self, request: Request, body: bytes) -> Response:
        """Return the answer of the service's gateway to a request with this body."""
        query = f"?{request.url.query}" if request.url.query else ""
        headers = {name: value for name, value in request.headers.items() if name not in _OWN_REQUEST}
        headers["x-request-id"] = request.state.arrival.request_id
        return _RelayedResponse(self._pool, request.method, request.url.path + query, body, headers)


class _RelayedResponse(Response):
    """Sends an answer of the service's gateway to the client, as its parts arrive."""

    def __init__(self, pool: ConnectionPool, *sent: *_Sent) -> None:
        super().__init__()
        self._pool, self._sent = pool, sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(scope["state"]["departure"], self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        try:
            answer = await self._pool.request(*self._sent)
            try:
                shown = {name: value for name, value in answer.headers.items() if name not in _OWN_RESPONSE}
                raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in shown.items()]
                await send({"type": "http.response.start", "status": answer.status, "headers": raw})
                while part := await answer.read():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            finally:
                self._pool.release(answer)
        except OSError as error:
            raise InstanceLostError("the service has ended") from error
        await send({"type": "http.response.body", "body": b""})
