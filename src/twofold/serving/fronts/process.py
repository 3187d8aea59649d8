"""A gateway process: serves HTTP on the socket of the service, whose requests run in the service's own process."""

import asyncio
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import uvloop

from twofold.serving.fronts.gateway_end import RemoteService
from twofold.serving.fronts.relay import Relay
from twofold.serving.gateway.app import GatewaySettings, create_front
from twofold.serving.gateway.gateway import BodyReader
from twofold.serving.gateway.server import HttpServer
from twofold.serving.gateway.tokenizer import load_tokenizer
from twofold.serving.launch.child_process import set_title
from twofold.serving.telemetry.logs import configure_logs

READ_GRACE_S = 2  # for clients to read the last output


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """Settings of a gateway process. `socket` is the service's Unix socket, and `url` that of its own gateway."""

    socket: str
    url: str
    tokenizer: Path | None
    settings: GatewaySettings
    forwards: bool  # whether servers behind the service answer what it does not support
    files_per_connection: int
    log_format: str


def run_front(config: FrontConfig, listener: socket.socket) -> None:
    """Serve until SIGTERM, or until the service ends."""
    set_title("gateway")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the service, too
    configure_logs(config.log_format)
    uvloop.run(_run(config, listener))


async def _run(config: FrontConfig, listener: socket.socket) -> None:
    tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    service, limits = RemoteService(), config.settings.limits
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.lost.set)
    await service.connect(config.socket)
    relay = Relay(config.url, BodyReader(limits))
    app = create_front(service, tokenizer, config.settings, relay, relay if config.forwards else None)
    server = HttpServer(
        app, listener, grace_s=READ_GRACE_S, limits=limits, files_per_connection=config.files_per_connection
    )
    await server.start()
    await service.lost.wait()
    await server.stop()
    relay.close()
