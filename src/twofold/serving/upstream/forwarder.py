"""Requests that the gateway does not run itself: a server gets each as it is, and its answer goes to the client."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from fastapi.responses import Response
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from twofold.errors import InstanceLostError, RequestError
from twofold.request import Request
from twofold.scheduling.admission.admission import QueuedRequest
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.serving.controller.live_request import deadline_error
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.gateway.middleware import Arrival
from twofold.serving.gateway.responses import error_response_for
from twofold.serving.gateway.schemas import check_served
from twofold.serving.gateway.streaming import send_until, unless_disconnected
from twofold.serving.upstream.client import UnavailableError
from twofold.serving.upstream.connection import ServerConnection
from twofold.serving.upstream.forecast import UpstreamPromptKeys
from twofold.serving.upstream.servers import Server

_REQUEST_HEADERS = ("accept", "content-type")
_RESPONSE_HEADERS = ("content-type", "cache-control", "retry-after")
_BYTES_PER_TOKEN = 4  # a guess, for admission only


class ServerForwarder:
    """Sends whole requests to the server with the fewest requests, within the limits of admission control.

    The gateway does not see the output of such a request, so it tries another server only before an answer has begun.
    """

    def __init__(
        self,
        requests: LiveRequests,
        cluster: ClusterScheduler,
        servers: Mapping[str, Server],
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
        deadline_s, length = self.deadline_s(request), max(1, len(body) // _BYTES_PER_TOKEN)
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
        reason = "no server is available"
        for server in self._candidates():
            named = body if fields is None else msgspec.json.encode({**fields, "model": server.model})
            try:
                response = await stack.enter_async_context(server.client.response("POST", path, named, headers))
            except UnavailableError as error:
                self._on_unavailable(server.instance, str(error))
                reason = str(error)
                continue
            if _answers(response.status):
                self._running[server.instance] += 1
                stack.callback(self._running.subtract, [server.instance])
                return response
            reason = f"{server.instance} returned HTTP {response.status}"
        raise InstanceLostError(reason)

    def _candidates(self) -> list[Server]:
        """Return the available servers that can run whole requests, fewest requests first."""
        loads = [load for load in self._pools if self._servers[load.id].up]
        loads = [load for load in loads if load.role.decodes] or loads
        loads.sort(key=lambda load: load.requests + self._running[load.id])
        return [self._servers[load.id] for load in loads]

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
    return 200 <= status < 300 or 400 <= status < 500


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = unless_disconnected(receive, self._send_all(send))
        await send_until(self._forwarder.deadline_s(self._request), scope, sending)

    async def _send_all(self, send: Send) -> None:
        events = False
        try:
            async with self._forwarder.response(self._request, self._sent, self._fields) as response:
                headers = {
                    name: value for name in _RESPONSE_HEADERS if (value := response.headers.get(name)) is not None
                }
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": response.status, "headers": raw})
                events = "event-stream" in headers.get("content-type", "")
                while part := await response.read():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except (UnavailableError, RequestError) as error:
            if not events:
                raise  # an HTTP error or, after the beginning of an answer, a broken connection
            lost = error if isinstance(error, RequestError) else InstanceLostError(str(error))
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % bytes(error_response_for(lost).body)})
            return
        await send({"type": "http.response.body", "body": b""})
