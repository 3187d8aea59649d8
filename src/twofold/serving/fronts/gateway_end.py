"""A gateway process's end of its connection to the service."""

import asyncio

from twofold.errors import InstanceLostError
from twofold.request import Generation
from twofold.serving.controller.live_request import OutputSink
from twofold.serving.controller.service import ServedModel
from twofold.serving.fronts.link import FROM_SERVICE, Begin, Finish, GatewayLink, Produced, ServiceReady
from twofold.serving.telemetry.context import CURRENT


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
