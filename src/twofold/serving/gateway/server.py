"""The gateway's HTTP server, on a socket that is bound already and on a loop that runs already."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from twofold.errors import ConfigurationError
from twofold.serving.gateway.limits import Limits
from twofold.serving.gateway.protocol import bounded

# How often to look whether the server is up; it offers nothing to wait on.
_POLL_S = 0.01
# Longer than the pauses of usual clients, so that few of them meet a connection as it closes.
KEEP_ALIVE_S = 65


class HttpServer:
    """Serves an application until told to stop. Signals are the caller's business.

    server = HttpServer(app, bound_socket)
    await server.start()          # returns when connections are taken
    await server.stop()           # running answers may end, within `grace_s`
    """

    def __init__(
        self, app: ASGIApp, sock: socket.socket, *, grace_s: int = 30, limits: Limits | None = None
    ) -> None:
        """After `grace_s` seconds of stopping, running answers are cancelled. Of `limits`, it takes `header_bytes`."""
        self._socket = sock
        self._task: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=bounded((limits or Limits()).header_bytes),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=grace_s,
            )
        )

    async def start(self) -> None:
        """Raises ConfigurationError where the server cannot be started."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                raise ConfigurationError("the HTTP server could not be started") from self._task.exception()
            await asyncio.sleep(_POLL_S)

    async def wait(self) -> None:
        """Wait until the server has stopped."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Take no more connections, let running answers end and wait for that."""
        self._server.should_exit = True
        await self.wait()
        # The server cancels what is left when the grace is over, but does not wait for it.
        cancelled = set(self._server.server_state.tasks)
        if cancelled:
            await asyncio.wait(cancelled)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield
