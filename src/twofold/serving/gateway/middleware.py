"""ASGI middleware around every request: request id, arrival time, API key check and error responses."""

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twofold.serving.gateway.keys import ApiKey, KeyRing
from twofold.serving.gateway.responses import error_response, error_response_for
from twofold.serving.telemetry.context import CURRENT, context_of

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/openapi.json", "/docs", "/dashboard"})
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

PostEndpoint = Callable[[Request], Awaitable[Response]]


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Id, API key and arrival time of an HTTP request."""

    request_id: str
    monotonic_s: float
    created: int
    key: ApiKey | None

    @property
    def key_name(self) -> str:
        """Name of the API key; empty without keys."""
        return "" if self.key is None else self.key.name


class Departure:
    """Tells when a client has left, by a call of `on_left`."""

    __slots__ = ("left", "on_left")

    def __init__(self) -> None:
        self.left = False
        self.on_left: Callable[[], object] | None = None

    def leave(self) -> None:
        """Record that the connection is lost."""
        self.left = True
        if self.on_left is not None:
            self.on_left()


class RequestMiddleware:
    """ASGI middleware of the gateway: sets request ids, checks API keys and converts exceptions to error responses.

    With `keys`, a request needs an API key, except for the dashboard, its health and its metrics. `posted` has
    the endpoints of POST requests that `app` need not route, by path: its layers take longer than such a request.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing | None, posted: Mapping[str, PostEndpoint]) -> None:
        self._app = app
        self._keys, self._posted = keys, posted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}  # the first of a name
        key = None if self._keys is None else self._keys.find(_authorization(headers))
        arrival = Arrival(
            request_id=_request_id(headers), monotonic_s=time.monotonic(), created=int(time.time()), key=key
        )
        scope.setdefault("state", {})["arrival"] = arrival
        scope["state"].setdefault("departure", Departure())  # servers of tests have none
        context = context_of(arrival.request_id, scope["path"], headers.get(b"traceparent", ""))
        CURRENT.set(context)
        started = complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                started = True
                own = {"x-request-id": arrival.request_id, "traceparent": str(context.span)}
                added = [(name.encode(), value.encode()) for name, value in own.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        if key is None and self._keys is not None and scope["path"] not in OPEN_PATHS:
            refused = error_response(401, "the API key is missing or wrong", code="invalid_api_key")
            await refused(scope, receive, send_with_id)
            return
        endpoint = self._posted.get(scope["path"]) if scope["method"] == "POST" else None
        try:
            if endpoint is None:
                await self._app(scope, receive, send_with_id)
            else:
                answer = await endpoint(Request(scope, receive))
                await answer(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # no client to respond to
        except Exception as error:
            if complete:  # `app` has answered, and raises the error again
                return
            if started:
                raise
            await error_response_for(error)(scope, receive, send_with_id)


def _authorization(headers: Mapping[bytes, str]) -> str:
    """Return the authorization of a request; Anthropic's clients send their key in a header of its own."""
    own = headers.get(b"x-api-key")
    return headers.get(b"authorization", "") if own is None else f"Bearer {own}"


def _request_id(headers: Mapping[bytes, str]) -> str:
    """Return the client's X-Request-Id if it is safe for headers and logs, otherwise a new id."""
    given = headers.get(b"x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else secrets.token_hex(16)
