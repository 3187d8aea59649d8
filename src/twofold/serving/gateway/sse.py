"""Answers as streams of server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from twofold.serving.gateway.disconnect import unless_disconnected
from twofold.serving.gateway.errors import failure_of

DONE = b"data: [DONE]\n\n"
# The last two keep proxies from collecting tokens before they pass them on.
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(data: bytes) -> bytes:
    """One event; `data` is JSON on one line."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends events as they come and ends with `[DONE]`, or with an error event and without it.

    Nothing is sent before the first event is there, so an error before it is an ordinary HTTP error. The
    events are closed when the stream has ended, for whatever reason; a client that leaves ends it at once.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope  # the same for every request
        await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, b"")
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await self._send(send, first)
            try:
                async for data in events:
                    await self._send(send, data)
            except Exception as error:  # noqa: BLE001 the status is sent already: this is how the client is told
                last = event(msgspec.json.encode(failure_of(error).body))
            else:
                last = DONE
        await self._send(send, last, more=False)

    @staticmethod
    async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})
