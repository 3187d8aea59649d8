"""A gateway process: serves HTTP on the socket of the service, whose requests run in the service's own process."""

import asyncio
import signal
import socket
from pathlib import Path

import msgspec
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


class DoorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway processes of a service, and the facts of the service that they need.

    With `forwards`, servers behind the service answer the requests that it does not support.
    """

    settings: GatewaySettings
    processes: int
    tokenizer: Path | None
    forwards: bool = False
    files_per_connection: int = 1
    log_format: str = "text"


class FrontConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a gateway process: the service's Unix socket, and the URL of the service's own gateway."""

    socket: str
    url: str
    door: DoorConfig


def run_front(config: FrontConfig, listener: socket.socket) -> None:
    """Serve until SIGTERM, or until the service ends."""
    set_title("gateway")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the service, too
    configure_logs(config.door.log_format)
    uvloop.run(_run(config, listener))


async def _run(config: FrontConfig, listener: socket.socket) -> None:
    door = config.door
    tokenizer = load_tokenizer(door.tokenizer)
    service, limits = RemoteService(), door.settings.limits
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.lost.set)
    await service.connect(config.socket)
    relay = Relay(config.url, BodyReader(limits))
    app = create_front(service, tokenizer, door.settings, relay, relay if door.forwards else None)
    server = HttpServer(
        app, listener, grace_s=READ_GRACE_S, limits=limits, files_per_connection=door.files_per_connection
    )
    await server.start()
    await service.lost.wait()
    await server.stop()
    relay.close()
