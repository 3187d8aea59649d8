"""Passes requests of a gateway process on to the service's own gateway, which has all state."""

from fastapi.responses import Response
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from twofold.errors import InstanceLostError
from twofold.serving.gateway.gateway import BodyReader
from twofold.serving.gateway.streaming import unless_disconnected
from twofold.serving.upstream.connection import ConnectionPool

# Of one connection, or set anew by each gateway.
_OWN_REQUEST = frozenset({"host", "connection", "content-length", "transfer-encoding", "expect", "x-request-id"})
_OWN_RESPONSE = frozenset({"connection", "content-length", "transfer-encoding", "date", "x-request-id", "traceparent"})

_Sent = tuple[str, str, bytes, dict[str, str]]  # method, path, body and headers


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
