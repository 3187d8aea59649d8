"""What the flags of `http_flags` ask for: the outside of a service, and what is told of it.

Who may use a service: API keys from flags and files, and what may be served without any.

What all services have in common once they are made: a listening socket, progress on stderr, signals.
"""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rich.console import Console

from twofold.cli.sizes import parse_size
from twofold.errors import ConfigurationError
from twofold.scheduling.admission.limits import AdmissionLimits
from twofold.serving.gateway.gateway import RequestLimits
from twofold.serving.gateway.keys import KeyRing, read_keys
from twofold.serving.launch.local_service import HttpConfig
from twofold.serving.telemetry.telemetry import TelemetryConfig
from twofold.slo import Slo


def http_config(
    name: str,
    keys: KeyRing | None,
    *,
    max_running: int,
    max_waiting: int,
    request_timeout: float,
    max_prompt_tokens: int | None,
    max_body_bytes: str,
    cache_retention: float = RequestLimits().longest_retention_s,
) -> HttpConfig:
    """Who may use a model called `name`, and how much of it; times in seconds. Raises ConfigurationError."""
    return HttpConfig(
        served_model_name=name,
        keys=keys,
        limits=RequestLimits(
            body_bytes=parse_size(max_body_bytes, "--max-body-bytes"),
            # One request with more could never be taken whole.
            generations=min(RequestLimits().generations, max_running + max_waiting),
            prompt_tokens=max_prompt_tokens,
            timeout_s=request_timeout,
            longest_retention_s=cache_retention,
        ),
        admission=AdmissionLimits(
            max_running=max_running,
            max_waiting=max_waiting,
            timeout_s=request_timeout,
            keys={} if keys is None else keys.limits,
        ),
    )


def telemetry_config(slo: str | None, otlp_endpoint: str | None) -> TelemetryConfig:
    """What the flags ask for; raises ConfigurationError on an SLO that is not understood."""
    return TelemetryConfig(otlp_endpoint=otlp_endpoint or None, slo=Slo() if slo is None else Slo.parse(slo))


KEY_FLAG = "--api-key"
KEY_VARIABLE = "TWOFOLD_API_KEY"


def find_keys(secrets: list[str] | None, file: Path | None) -> KeyRing | None:
    """The keys, which from then on are nowhere to be read in this process; raises ConfigurationError."""
    keys = read_keys(secrets or [], file)
    os.environ.pop(KEY_VARIABLE, None)  # the workers would inherit it
    hide_secrets()
    return keys


def check_loopback(host: str, address: str) -> None:
    """Raises ConfigurationError where others than this machine could use a service that asks for no key."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigurationError(
            f"--host {host} lets other machines in: ask for a key with --api-key or --api-keys, "
            "or say --allow-anonymous if nobody needs one"
        )


def hide_secrets() -> None:
    """Overwrite the keys in the command line and the environment that the system shows of this process.

    Linux reads both from the process's own memory. Where that may not be written, they stay: a file of keys is the
    way that never shows them.
    """
    try:
        with Path("/proc/self/stat").open("rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            # Fields 48 to 51 of proc(5), counted from the third: where arguments and environment begin and end.
            for start, end, hide in (
                (int(fields[45]), int(fields[46]), hide_arguments),
                (int(fields[47]), int(fields[48]), hide_variable),
            ):
                memory.seek(start)
                held = memory.read(end - start)
                memory.seek(start)
                memory.write(hide(held))
    except (OSError, ValueError, IndexError, OverflowError):
        return


def hide_arguments(held: bytes) -> bytes:
    """The same arguments, ended by zero bytes, with the values of `--api-key` as asterisks of their length."""
    flag = KEY_FLAG.encode()
    hidden: list[bytes] = []
    previous = b""
    for argument in held.split(b"\0"):
        if previous == flag:
            hidden.append(b"*" * len(argument))
        elif argument.startswith(flag + b"="):
            hidden.append(flag + b"=" + b"*" * (len(argument) - len(flag) - 1))
        else:
            hidden.append(argument)
        previous = argument
    return b"\0".join(hidden)


def hide_variable(held: bytes) -> bytes:
    """The same for the variable's value among `NAME=value` strings."""
    name = KEY_VARIABLE.encode() + b"="
    return b"\0".join(
        name + b"*" * (len(each) - len(name)) if each.startswith(name) else each for each in held.split(b"\0")
    )


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
