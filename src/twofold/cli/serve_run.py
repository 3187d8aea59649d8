"""What `twofold serve` does once its flags are read: check, listen, start, serve, and leave nothing behind."""

import asyncio
import logging
import os
import signal
import socket
import tempfile
from pathlib import Path

import uvloop
from rich.console import Console

from twofold.errors import ConfigurationError
from twofold.scheduling.handoffs import HANDOFF_POLICIES
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS
from twofold.serving.config import EngineConfig, ServiceConfig, WorkerConfig
from twofold.serving.local_service import HttpConfig, LocalService
from twofold.serving.logs import configure_logs
from twofold.serving.model_source import find_model
from twofold.serving.plan import plan_workers
from twofold.serving.telemetry import Telemetry, TelemetryConfig, make_telemetry
from twofold.slo import Slo

__all__ = ["EngineConfig", "HttpConfig", "find_model", "plan_workers", "run", "telemetry_config"]

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")


def run(
    engine: EngineConfig,
    workers: tuple[WorkerConfig, ...],
    http: HttpConfig,
    telemetry: TelemetryConfig,
    *,
    host: str,
    port: int,
    router: str,
    handoff: str,
    journal: Path | None,
    log_format: str,
) -> None:
    """Serve until Ctrl-C or SIGTERM; raises ConfigurationError for what cannot be served."""
    _check_choice("--router", router, FIXED_ROLE_ROUTERS)
    _check_choice("--handoff", handoff, tuple(HANDOFF_POLICIES))
    _check_choice("--dtype", engine.dtype, DTYPES)
    if journal is not None:
        _make_directory("--journal", journal)
    configure_logs(log_format)
    observed = make_telemetry(http.served_model_name, telemetry)
    listener = _listen(host, port)
    with tempfile.TemporaryDirectory(prefix=f"twofold-{os.getpid()}-", ignore_cleanup_errors=True) as run_dir:
        config = ServiceConfig(
            engine=engine,
            workers=workers,
            run_dir=run_dir,
            router=router,
            handoff=handoff,
            journal_dir=None if journal is None else str(journal),
            log_format=log_format,
        )
        uvloop.run(_serve(config, http, observed, listener))


def telemetry_config(slo: str | None, otlp_endpoint: str | None) -> TelemetryConfig:
    """What the flags ask for; raises ConfigurationError on an SLO that is not understood."""
    return TelemetryConfig(otlp_endpoint=otlp_endpoint or None, slo=Slo() if slo is None else Slo.parse(slo))


async def _serve(
    config: ServiceConfig, http: HttpConfig, telemetry: Telemetry, listener: socket.socket
) -> None:
    if config.log_format == "json":
        await _run(LocalService(config, http, listener, log.info, telemetry))
        return
    console = Console(stderr=True)
    with console.status("starting") as status:

        def on_progress(what: str) -> None:
            if what.startswith("ready"):
                status.stop()
            if not console.is_terminal or what.startswith("ready"):
                console.print(f"twofold: {what}", highlight=False)
            status.update(what)

        await _run(LocalService(config, http, listener, on_progress, telemetry))


async def _run(service: LocalService) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)
    await service.run()


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything slow starts, so that a port in use is known at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # what follows repeats the address
        raise ConfigurationError(f"cannot listen on {host}:{port}: {reason}") from error


def _make_directory(flag: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{flag} {path} is not a directory to write to: {error.strerror}") from error


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{flag} {value!r} is unknown: choose one of {', '.join(choices)}")
