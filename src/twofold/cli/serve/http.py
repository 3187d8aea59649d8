"""HTTP set-up of `twofold serve` and `twofold route`: API keys, limits, listening socket and event loop."""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

import uvloop
from rich.console import Console

from twofold.cli.options import HttpSettings, LimitSettings, TelemetrySettings
from twofold.errors import ConfigurationError
from twofold.scheduling.admission.limits import AdmissionLimits
from twofold.serving.gateway.app import GatewaySettings
from twofold.serving.gateway.gateway import RequestLimits
from twofold.serving.gateway.keys import KeyRing, read_keys
from twofold.serving.gateway.tools.families import AnswerParsers
from twofold.serving.launch.local_service import HttpConfig
from twofold.serving.telemetry.logs import configure_logs
from twofold.serving.telemetry.telemetry import Telemetry, make_telemetry

KEY_FLAG: Final = "--api-key"
KEY_VARIABLE: Final = "TWOFOLD_API_KEY"

log = logging.getLogger(__name__)

OnProgress = Callable[[str], None]


class Runnable(Protocol):
    """Interface of a service that runs until `stop` is called."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...


def http_config(
    settings: LimitSettings,
    name: str,
    keys: KeyRing | None,
    processes: int,
    cache_retention_s: float = RequestLimits().longest_retention_s,
) -> HttpConfig:
    """Return the HTTP configuration of a service: model name, API keys, number of gateway processes, and limits."""
    limits = RequestLimits(
        connections_per_address=settings.max_connections_per_address,
        body_bytes=settings.max_body_bytes,
        # A request with more generations than this could never be admitted.
        generations=min(RequestLimits().generations, settings.max_running + settings.max_waiting),
        prompt_tokens=settings.max_prompt_tokens,
        timeout_s=settings.request_timeout,
        longest_retention_s=cache_retention_s,
        stored_response_bytes=settings.response_store,
        stored_response_s=settings.response_lifetime,
    )
    parsers = AnswerParsers(settings.tool_parser, settings.reasoning_parser)
    return HttpConfig(
        served_model_name=name,
        gateway=GatewaySettings(keys=keys, limits=limits, parsers=parsers),
        processes=processes,
        admission=AdmissionLimits(
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            timeout_s=settings.request_timeout,
            keys={} if keys is None else keys.limits,
        ),
    )


def start_telemetry(settings: TelemetrySettings, model: str) -> Telemetry:
    """Configure the logs, and return the telemetry of a service. Raises ConfigurationError if a package is missing."""
    configure_logs(settings.log_format, requests=settings.log_requests)
    return make_telemetry(model, settings.otlp_endpoint, settings.slo)


def find_keys(settings: HttpSettings) -> KeyRing | None:
    """Read the API keys, if any, from the flags, and hide them from other processes. Raises ConfigurationError."""
    keys = read_keys(list(settings.api_key), settings.api_keys)
    variable = os.environ.pop(KEY_VARIABLE, "")  # workers inherit the environment
    hide_secrets({*settings.api_key, variable} - {""})
    return keys


def check_loopback(host: str, address: str) -> None:
    """Raise ConfigurationError unless `address` is a loopback address."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigurationError(
            f"--host {host} lets other machines in: require a key with --api-key or --api-keys, "
            "or allow everybody with --allow-anonymous"
        )


def hide_secrets(secrets: Iterable[str]) -> None:
    """Overwrite secrets in this process's command line and environment, which other processes can read."""
    try:
        with Path("/proc/self/stat").open("rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            # Fields 48 to 51 of proc(5), counted from the third: the bounds of arguments and environment.
            for start, end in ((int(fields[45]), int(fields[46])), (int(fields[47]), int(fields[48]))):
                memory.seek(start)
                shown = memory.read(end - start)
                memory.seek(start)
                memory.write(masked(shown, secrets))
    except (OSError, ValueError, IndexError, OverflowError):
        return  # the secrets stay visible


def masked(shown: bytes, secrets: Iterable[str]) -> bytes:
    """Replace secrets by asterisks in NUL-separated arguments or variables, as in /proc/PID/cmdline and environ."""
    prefixes = ("", f"{KEY_FLAG}=", f"{KEY_VARIABLE}=")
    hidden = {(it + one).encode(): it.encode() + b"*" * len(one.encode()) for one in secrets for it in prefixes}
    return b"\0".join(hidden.get(entry, entry) for entry in shown.split(b"\0"))


def listen(settings: HttpSettings, keys: KeyRing | None) -> socket.socket:
    """Open the listening socket of the service.

    Raise ConfigurationError if the port is in use. Also raise the error if other machines could connect without
    an API key, unless `--allow-anonymous` is set.
    """
    host, port = settings.host, settings.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if keys is None and not settings.allow_anonymous:
            check_loopback(host, str(address[0]))
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # the rest repeats the address
        raise ConfigurationError(f"cannot listen on {host}:{port}: {reason}") from error


def serve(make: Callable[[OnProgress], Runnable], log_format: str) -> None:
    """Create a service and run it until Ctrl-C or SIGTERM."""
    uvloop.run(_serve(make, log_format))


async def _serve(make: Callable[[OnProgress], Runnable], log_format: str) -> None:
    if log_format == "json":
        await _run(make(log.info))
        return
    console = Console(stderr=True)
    with console.status("starting") as status:
        ready = False

        def on_progress(what: str) -> None:
            nonlocal ready
            ready = ready or what.startswith("ready")
            if ready:
                status.stop()
            if ready or not console.is_terminal:
                console.print(f"twofold: {what}", highlight=False, soft_wrap=True)
            status.update(what)

        await _run(make(on_progress))


async def _run(service: Runnable) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)
    await service.run()
