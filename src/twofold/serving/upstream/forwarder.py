"""Requests that the gateway does not run itself: a server gets each as it is, and its answer goes to the client."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from fastapi.responses import Response
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from twofold.errors import InstanceLostError, RequestError, TwofoldError
from twofold.request import Request
from twofold.scheduling.admission.admission import QueuedRequest
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.serving.controller.live_request import deadline_error
from twofold.serving.controller.requests import MAX_FAILED_ATTEMPTS, REFUSED_S, LiveRequests
from twofold.serving.gateway.generations import CHARACTERS_PER_TOKEN
from twofold.serving.gateway.middleware import Arrival
from twofold.serving.gateway.responses import error_response_for
from twofold.serving.gateway.schemas import check_served
from twofold.serving.gateway.streaming import cut_off, send_until, unless_disconnected
from twofold.serving.upstream.client import UnavailableError, error_text
from twofold.serving.upstream.connection import ServerConnection
from twofold.serving.upstream.forecast import UpstreamPromptKeys
from twofold.serving.upstream.servers import Server, ServerRegistry, refusal_error

log = logging.getLogger(__name__)

_REQUEST_HEADERS = ("accept", "content-type")
_RESPONSE_HEADERS = ("content-type", "cache-control", "retry-after")
_ERROR_BYTES = 1 << 20  # of an error that a server returns
_ERROR_EVENT = b'data: {"error"'
_OWN_STATUSES = frozenset({401, 403, 429})  # of 4xx: about the servers, not about the request


class ServerForwarder:
    """Sends whole requests to the server with the fewest requests, within the limits of admission control.

    The gateway does not see the output of such a request, so it tries another server only before an answer has begun.
    """

    def __init__(
        self,
        requests: LiveRequests,
        cluster: ClusterScheduler,
        servers: ServerRegistry,
        prompt_keys: UpstreamPromptKeys,
        on_unavailable: Callable[[str, str], object],
        *,
        model: str,
        timeout_s: float,
    ) -> None:
        self._requests, self._pools, self._servers = requests, cluster.pools, servers
        self._prompt_keys, self._on_unavailable = prompt_keys, on_unavailable
        self._model, self._timeout_s = model, timeout_s
        self._running: Counter[str] = Counter()  # requests by server

    def answer(self, request: HttpRequest, body: bytes) -> Response:
        """Return the answer of a server to a request with this body. Raises RequestError for another model."""
        arrival: Arrival = request.state.arrival
        fields = self._fields(body, arrival) if "json" in request.headers.get("content-type", "json") else None
        return _ForwardedResponse(self, request, body, fields)

    def deadline_s(self, request: HttpRequest) -> float:
        """Return the deadline of a request, on the monotonic clock."""
        arrival: Arrival = request.state.arrival
        return arrival.monotonic_s + self._timeout_s

    @asynccontextmanager
    async def response(
        self, request: HttpRequest, body: bytes, fields: Mapping[str, object] | None
    ) -> AsyncGenerator[ServerConnection, None]:
        """Yield the response of the first server that responds. Raises RequestError and InstanceLostError."""
        arrival: Arrival = request.state.arrival
        deadline_s, length = self.deadline_s(request), max(1, len(body) // CHARACTERS_PER_TOKEN)
        # Clients may reuse request ids.
        request_id = f"{arrival.request_id}-{secrets.token_hex(8)}"
        admitted = Request(id=request_id, arrival_s=arrival.monotonic_s, prompt_tokens=length, output_tokens=1)
        try:
            async with (
                asyncio.timeout_at(asyncio.get_running_loop().time() + deadline_s - time.monotonic()),
                self._requests.forwarding(QueuedRequest(admitted, arrival.key_name, deadline_s=deadline_s)),
                AsyncExitStack() as stack,
            ):
                yield await self._first_response(request, body, fields, stack)
        except TimeoutError as error:
            raise deadline_error() from error

    async def _first_response(
        self, request: HttpRequest, body: bytes, fields: Mapping[str, object] | None, stack: AsyncExitStack
    ) -> ServerConnection:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name in _REQUEST_HEADERS if (value := request.headers.get(name)) is not None}
        failure: TwofoldError = InstanceLostError("no server is available")
        for attempt, server in enumerate(self._candidates()[:MAX_FAILED_ATTEMPTS]):
            if isinstance(failure, RequestError):  # a server refused the request
                await asyncio.sleep(REFUSED_S * 2**attempt)
            named = body if fields is None else msgspec.json.encode({**fields, "model": server.model})
            opened = server.client.response("POST", path, named, headers)
            try:
                response = await stack.enter_async_context(opened)
                if _answers(response.status):
                    self._running[server.instance] += 1
                    stack.callback(self._running.subtract, [server.instance])
                    return response
                reason = error_text(await response.read_all(_ERROR_BYTES))
            except (UnavailableError, ConnectionError) as error:
                self._on_unavailable(server.instance, str(error))
                failure = InstanceLostError(f"{server.instance} is not available")
                continue
            log.warning("%s returned HTTP %d for %s: %s", server.instance, response.status, path, reason)
            failure = refusal_error(server.instance, response.status)
        raise failure

    def _candidates(self) -> list[Server]:
        """Return the available servers that can run whole requests, fewest requests first."""
        servers = self._servers.members
        loads = [load for load in self._pools if servers[load.id].up]
        loads = [load for load in loads if load.role.decodes] or loads
        loads.sort(key=lambda load: load.requests + self._running[load.id])
        return [servers[load.id] for load in loads]

    async def parts(self, response: ServerConnection) -> AsyncIterator[bytes]:
        """Yield the body of a response in parts, without addresses of servers in errors. Raises InstanceLostError."""
        try:
            if response.status >= 400:
                yield self._hide_addresses(await response.read_all(_ERROR_BYTES))
                return
            while part := await response.read():
                yield self._hide_addresses(part) if _ERROR_EVENT in part else part
        except ConnectionError as error:
            log.warning("a server broke its answer: %s", error)
            raise InstanceLostError("the server was lost before the end of its answer") from error

    def _hide_addresses(self, body: bytes) -> bytes:
        text = self._servers.hide_addresses(body.decode(errors="surrogateescape"))
        return text.encode(errors="surrogateescape")

    def _fields(self, body: bytes, arrival: Arrival) -> dict[str, object]:
        """Return the fields of a JSON body, with the cache salt of its API key."""
        try:
            fields: dict[str, object] = dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
            model = msgspec.json.decode(body, type=_Named)
        except msgspec.DecodeError as error:
            raise RequestError(f"the body is not a JSON object of a model: {error}", code="invalid_json") from error
        if model.model is not None:
            check_served(model.model, self._model)
        salt = self._prompt_keys.salt(arrival.key_name, model.cache_salt or "")
        return fields | ({"cache_salt": salt} if salt else {})


def _answers(status: int) -> bool:
    """Return whether a response with this status goes to the client: after another one, the next server may answer."""
    return 200 <= status < 300 or (400 <= status < 500 and status not in _OWN_STATUSES)


class _Named(msgspec.Struct, frozen=True):
    model: str | None = None
    cache_salt: str | None = None


class _ForwardedResponse(Response):
    """Sends the answer of a server to the client, as its parts arrive."""

    def __init__(
        self, forwarder: ServerForwarder, request: HttpRequest, body: bytes, fields: Mapping[str, object] | None
    ) -> None:
        super().__init__()
        self._forwarder, self._request, self._sent, self._fields = forwarder, request, body, fields
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sending = unless_disconnected(scope["state"]["departure"], self._send_all(send))
            await send_until(self._forwarder.deadline_s(self._request), scope, sending)
        except (InstanceLostError, RequestError):
            if not self._begun:
                raise
            cut_off(scope)  # the client may not read: closing would wait for it

    async def _send_all(self, send: Send) -> None:
        events = False
        try:
            async with self._forwarder.response(self._request, self._sent, self._fields) as response:
                headers = {
                    name: value for name in _RESPONSE_HEADERS if (value := response.headers.get(name)) is not None
                }
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": response.status, "headers": raw})
                self._begun = True
                events = "event-stream" in headers.get("content-type", "")
                async for part in self._forwarder.parts(response):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except (InstanceLostError, RequestError) as error:
            if not events:
                raise  # an HTTP error or, after the beginning of an answer, a broken connection
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % bytes(error_response_for(error).body)})
            return
        await send({"type": "http.response.body", "body": b""})
