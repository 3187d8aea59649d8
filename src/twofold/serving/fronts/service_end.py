"""The service's end of its connections to gateway processes."""

import asyncio
import logging
from contextvars import copy_context

import msgspec

from twofold.errors import TwofoldError
from twofold.request import TokenOutput
from twofold.serving.controller.service import Service
from twofold.serving.fronts.link import FROM_GATEWAY, Begin, Finish, GatewayLink, Produced, Refused, ServiceReady
from twofold.serving.telemetry.context import CURRENT

log = logging.getLogger(__name__)


async def listen_to_gateways(service: Service, path: str) -> asyncio.Server:
    """Run the requests of gateway processes, which connect to the Unix socket `path`."""
    return await asyncio.get_running_loop().create_unix_server(lambda: _GatewayEnd(service), path)


class _GatewayEnd(GatewayLink):
    """Runs the requests of one gateway process, and aborts them if it ends."""

    def __init__(self, service: Service) -> None:
        super().__init__(self._receive, self._gone)
        self._service, self._running = service, set[str]()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.send(ServiceReady(model=self._service.model, takes_text=self._service.takes_text))

    def _receive(self, line: bytes) -> None:
        try:
            message = FROM_GATEWAY.decode(line)
        except msgspec.DecodeError:
            log.exception("a gateway process sent an invalid message")
            self.close()
            return
        if isinstance(message, Begin):
            copy_context().run(self._begin, message)
        elif message.request_id in self._running:
            self._running.discard(message.request_id)
            self._end(message)

    def _begin(self, message: Begin) -> None:
        CURRENT.set(message.context)
        request_id = message.generation.request.id
        self._running.add(request_id)
        try:
            self._service.submit(message.generation, _RemoteSink(self, request_id))
        except TwofoldError as error:
            self.fail(request_id, error)

    def _end(self, message: Finish) -> None:
        if message.complete:
            self._service.stop(message.request_id)
        else:
            self._service.abort(message.request_id)

    def produce(self, request_id: str, output: TokenOutput) -> None:
        """Pass on a token of a request."""
        self.send(Produced(request_id=request_id, output=output))
        if output.finish_reason is not None:
            self._running.discard(request_id)

    def fail(self, request_id: str, error: TwofoldError) -> None:
        """Pass on the failure of a request."""
        self._running.discard(request_id)
        self.send(Refused.of(request_id, error))

    def _gone(self) -> None:
        for request_id in list(self._running):
            self._service.abort(request_id)


class _RemoteSink:
    """Passes the output of a request to its gateway process."""

    def __init__(self, end: _GatewayEnd, request_id: str) -> None:
        self._end, self._request_id = end, request_id

    def output(self, output: TokenOutput) -> None:
        self._end.produce(self._request_id, output)

    def failed(self, error: TwofoldError) -> None:
        self._end.fail(self._request_id, error)
