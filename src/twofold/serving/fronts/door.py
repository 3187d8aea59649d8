"""HTTP of a service: in its own process, or in several gateway processes that share one socket."""

import asyncio
import logging
import multiprocessing
import socket
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import copy_context
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

import msgspec
from starlette.types import ASGIApp

from twofold.errors import TwofoldError
from twofold.request import TokenOutput
from twofold.serving.controller.live_request import OutputSink
from twofold.serving.controller.service import Service
from twofold.serving.fronts.link import FROM_GATEWAY, Begin, Finish, GatewayLink, Produced, Refused, ServiceReady
from twofold.serving.fronts.process import READ_GRACE_S, DoorConfig, FrontConfig, run_front
from twofold.serving.gateway.server import HttpServer
from twofold.serving.telemetry.context import CURRENT

log = logging.getLogger(__name__)

STOP_S = 5.0  # until a gateway process that does not end is killed
SOON_S = 1.0  # a process that lives no longer is started again only after this time
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["twofold.serving.fronts.process", "transformers.tokenization_utils_tokenizers"])


def prepare_door(processes: int) -> None:
    """Begin to import what gateway processes need, while the service starts."""
    if processes > 1:
        forkserver.ensure_running()


@asynccontextmanager
async def open_door(
    service: Service, app: ASGIApp, listener: socket.socket, config: DoorConfig
) -> AsyncGenerator[None, None]:
    """Serve HTTP on `listener` inside a `with` statement. `app` is the service's own gateway."""
    several = config.processes > 1
    own = socket.create_server(("127.0.0.1", 0)) if several else listener
    server = HttpServer(
        app, own, grace_s=READ_GRACE_S, limits=config.settings.limits, files_per_connection=config.files_per_connection
    )
    await server.start()
    try:
        if not several:
            yield
            return
        with tempfile.TemporaryDirectory(prefix="twofold-gateways-") as directory:
            path = f"{directory}/service"
            front = FrontConfig(socket=path, url=f"http://127.0.0.1:{own.getsockname()[1]}", door=config)
            # The gateway processes connect to this Unix socket.
            async with await asyncio.get_running_loop().create_unix_server(lambda: _GatewayEnd(service), path):
                processes = GatewayProcesses(front, listener, config.processes)
                processes.start()
                try:
                    yield
                finally:
                    await processes.stop()
    finally:
        await server.stop()
        if several:
            own.close()


class GatewayProcesses:
    """The gateway processes of a service. One that ends is started again."""

    def __init__(self, config: FrontConfig, listener: socket.socket, count: int) -> None:
        self._config, self._listener, self._count = config, listener, count
        self._running: dict[int, tuple[ForkServerProcess, float]] = {}  # by sentinel, with the time of the start
        self._loop = asyncio.get_running_loop()
        self._stopping = False

    def start(self) -> None:
        for _ in range(self._count):
            self._start_one()

    async def stop(self) -> None:
        """End all processes: they first complete their responses."""
        self._stopping = True
        ending = [process for process, _ in self._running.values()]
        for sentinel, (process, _) in self._running.items():
            self._loop.remove_reader(sentinel)
            process.terminate()
        deadline_s = time.monotonic() + STOP_S
        while any(process.is_alive() for process in ending) and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for process in ending:
            process.kill()
            process.join()

    def _start_one(self) -> None:
        if self._stopping:
            return
        process = _FORKS.Process(target=run_front, args=(self._config, self._listener), name="gateway", daemon=True)
        process.start()
        self._running[process.sentinel] = (process, time.monotonic())
        self._loop.add_reader(process.sentinel, self._ended, process.sentinel)

    def _ended(self, sentinel: int) -> None:
        self._loop.remove_reader(sentinel)
        process, started_s = self._running.pop(sentinel)
        process.join()
        log.error("gateway process %d ended with code %s: starting another", process.pid or 0, process.exitcode)
        self._loop.call_later(0.0 if time.monotonic() - started_s > SOON_S else SOON_S, self._start_one)


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
        sink = _RemoteSink(self, self._running, request_id)
        self._running.add(request_id)
        try:
            self._service.submit(message.generation, sink)
        except TwofoldError as error:
            sink.failed(error)

    def _end(self, message: Finish) -> None:
        if message.complete:
            self._service.stop(message.request_id)
        else:
            self._service.abort(message.request_id)

    def _gone(self) -> None:
        for request_id in list(self._running):
            self._service.abort(request_id)


class _RemoteSink(OutputSink):
    """Passes the output of a request to its gateway process."""

    def __init__(self, end: GatewayLink, running: set[str], request_id: str) -> None:
        self._end, self._running, self._request_id = end, running, request_id

    def output(self, output: TokenOutput) -> None:
        self._end.send(Produced(request_id=self._request_id, output=output))
        if output.finish_reason is not None:
            self._running.discard(self._request_id)

    def failed(self, error: TwofoldError) -> None:
        self._running.discard(self._request_id)
        self._end.send(Refused.of(self._request_id, error))
