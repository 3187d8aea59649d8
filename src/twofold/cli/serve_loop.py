"""What all services have in common once they are made: a listening socket, progress on stderr, signals."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from typing import Protocol

from rich.console import Console

from twofold.cli.serve_access import check_loopback
from twofold.errors import ConfigurationError

log = logging.getLogger(__name__)

OnProgress = Callable[[str], None]


class Runnable(Protocol):
    """A service that runs until it is told to stop."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...


async def serve(make: Callable[[OnProgress], Runnable], log_format: str) -> None:
    """Run the service that `make` gives until Ctrl-C or SIGTERM."""
    if log_format == "json":
        await _run(make(log.info))
        return
    console = Console(stderr=True)
    with console.status("starting") as status:

        def on_progress(what: str) -> None:
            if what.startswith("ready"):
                status.stop()
            if not console.is_terminal or what.startswith("ready"):
                console.print(f"twofold: {what}", highlight=False)
            status.update(what)

        await _run(make(on_progress))


async def _run(service: Runnable) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)
    await service.run()


def listen(host: str, port: int, *, exposable: bool) -> socket.socket:
    """Bind before anything slow starts, so that a port in use is known at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not exposable:
            check_loopback(host, str(address[0]))
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # what follows repeats the address
        raise ConfigurationError(f"cannot listen on {host}:{port}: {reason}") from error
