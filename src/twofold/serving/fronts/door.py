"""HTTP of a service: in its own process, or in several gateway processes that share one socket."""

import asyncio
import logging
import multiprocessing
import socket
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

from starlette.types import ASGIApp

from twofold.serving.controller.service import Service
from twofold.serving.fronts.process import READ_GRACE_S, DoorConfig, FrontConfig, run_front
from twofold.serving.fronts.service_end import listen_to_gateways
from twofold.serving.gateway.server import HttpServer

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
            async with await listen_to_gateways(service, path):
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
