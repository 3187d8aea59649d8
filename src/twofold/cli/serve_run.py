"""What `twofold serve` does once its flags are read: check, listen, start, serve, and leave nothing behind."""

import asyncio
import logging
import os
import signal
import socket
import tempfile

import msgspec
import uvloop
from rich.console import Console

from twofold.cli.serve_access import check_loopback, find_keys
from twofold.cli.serve_flags import Flags, public_name, service_of
from twofold.cli.serve_overload import OverloadFlags
from twofold.cli.serve_ray import Launch, launch_of, ray_flags
from twofold.cli.serve_replan import ReplanFlags
from twofold.cli.store_flags import store_config
from twofold.errors import ConfigurationError
from twofold.scheduling.admission_limits import AdmissionLimits
from twofold.serving.config import ServiceConfig
from twofold.serving.gateway.limits import Limits
from twofold.serving.launcher import Launcher
from twofold.serving.local_service import HttpConfig, LocalService
from twofold.serving.logs import configure_logs
from twofold.serving.telemetry import Telemetry, TelemetryConfig, make_telemetry
from twofold.slo import Slo

__all__ = [
    "AdmissionLimits",
    "Flags",
    "HttpConfig",
    "Limits",
    "OverloadFlags",
    "ReplanFlags",
    "find_keys",
    "launch_of",
    "public_name",
    "ray_flags",
    "run",
    "service_of",
    "store_config",
    "telemetry_config",
]

log = logging.getLogger(__name__)


def run(
    config: ServiceConfig,
    http: HttpConfig,
    telemetry: TelemetryConfig,
    *,
    host: str,
    port: int,
    allow_anonymous: bool,
    launch: Launch,
) -> None:
    """Serve until Ctrl-C or SIGTERM, with sockets in a directory of its own; raises ConfigurationError."""
    configure_logs(config.log_format)
    observed = make_telemetry(http.served_model_name, telemetry)
    listener = _listen(host, port, exposable=allow_anonymous or http.keys is not None)
    with tempfile.TemporaryDirectory(prefix=f"twofold-{os.getpid()}-", ignore_cleanup_errors=True) as run_dir:
        config, launcher = launch(msgspec.structs.replace(config, run_dir=run_dir))
        uvloop.run(_serve(config, http, observed, listener, launcher))


def telemetry_config(slo: str | None, otlp_endpoint: str | None) -> TelemetryConfig:
    """What the flags ask for; raises ConfigurationError on an SLO that is not understood."""
    return TelemetryConfig(otlp_endpoint=otlp_endpoint or None, slo=Slo() if slo is None else Slo.parse(slo))


async def _serve(
    config: ServiceConfig,
    http: HttpConfig,
    telemetry: Telemetry,
    listener: socket.socket,
    launcher: Launcher,
) -> None:
    if config.log_format == "json":
        await _run(LocalService(config, http, listener, log.info, telemetry, launcher))
        return
    console = Console(stderr=True)
    with console.status("starting") as status:

        def on_progress(what: str) -> None:
            if what.startswith("ready"):
                status.stop()
            if not console.is_terminal or what.startswith("ready"):
                console.print(f"twofold: {what}", highlight=False)
            status.update(what)

        await _run(LocalService(config, http, listener, on_progress, telemetry, launcher))


async def _run(service: LocalService) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)
    await service.run()


def _listen(host: str, port: int, *, exposable: bool) -> socket.socket:
    """Bind before anything slow starts, so that a port in use is known at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not exposable:
            check_loopback(host, str(address[0]))
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # what follows repeats the address
        raise ConfigurationError(f"cannot listen on {host}:{port}: {reason}") from error
