"""Messages between a service and its gateway processes: lines of JSON on a Unix socket."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from twofold.errors import InstanceLostError, RequestError, TwofoldError
from twofold.request import Generation, TokenOutput
from twofold.serving.controller.service import ServedModel
from twofold.serving.telemetry.context import RequestContext

_ENCODER: Final = msgspec.json.Encoder()


class ServiceReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The service is ready: its model, and whether its servers tokenize prompts."""

    model: ServedModel
    takes_text: bool


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a request, which belongs to an HTTP request with this context."""

    generation: Generation
    context: RequestContext | None


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a request: as complete, or aborted."""

    request_id: str
    complete: bool


class Produced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A token of a request."""

    request_id: str
    output: TokenOutput


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request has failed. `fields` are those of a RequestError; None for the loss of an instance."""

    request_id: str
    message: str
    fields: dict[str, Any] | None = None

    @classmethod
    def of(cls, request_id: str, error: TwofoldError) -> "Refused":
        fields = vars(error) if isinstance(error, RequestError) else None
        return cls(request_id=request_id, message=str(error), fields=fields)

    def error(self) -> TwofoldError:
        return InstanceLostError(self.message) if self.fields is None else RequestError(self.message, **self.fields)


ToService = Begin | Finish
ToGateway = ServiceReady | Produced | Refused
FROM_GATEWAY: Final = msgspec.json.Decoder(ToService)
FROM_SERVICE: Final = msgspec.json.Decoder(ToGateway)


class GatewayLink(asyncio.Protocol):
    """One end of a connection. Messages of one turn of the event loop leave in one write."""

    _transport: asyncio.Transport

    def __init__(self, on_line: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_line, self._on_lost = on_line, on_lost
        self._parts, self._lines = list[bytes](), list[bytes]()  # of an incomplete line; to be sent

    def send(self, message: ToService | ToGateway) -> None:
        """Send a message, or drop it after the end of the connection."""
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._flush)
        self._lines.append(_ENCODER.encode(message))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        first, *more = data.split(b"\n")
        self._parts.append(first)
        if more:
            lines, self._parts = [b"".join(self._parts), *more[:-1]], more[-1:]
            for line in lines:
                self._on_line(line)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def _flush(self) -> None:
        self._lines.append(b"")
        if not self._transport.is_closing():
            self._transport.write(b"\n".join(self._lines))
        self._lines.clear()
