"""`twofold join`, which runs workers on this host for a service on another host, and `twofold keygen`."""

import asyncio
import os
import re
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
import uvloop

from twofold.cli.options import DEVICE, GPU_MEMORY, KV_CACHE_MEMORY, LOG_FORMATS, PIN_CORES, StoreSettings
from twofold.cli.settings import command, flag
from twofold.errors import ConfigurationError, require
from twofold.instance import Role
from twofold.security.key import read_key, write_key
from twofold.security.network import HostNetwork, TcpEndpoint, own_host
from twofold.serving.config import ServiceConfig
from twofold.serving.launch.joined_host import HostOffer, JoinedHost
from twofold.serving.launch.model_source import find_model, model_fingerprint
from twofold.serving.launch.worker_plan import with_cores
from twofold.serving.telemetry.logs import configure_logs

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class JoinSettings(StoreSettings):
    """All flags of `twofold join`."""

    controller: str = flag(
        "Address of the service, as in its --listen-workers.", ..., positional=True, metavar="tcp://ADDRESS:PORT"
    )
    cluster_key: Path = flag("Cluster key file, as written by `twofold keygen`.", ..., metavar="FILE")
    model: str = flag("Model directory or hub id; the same model as that of the service.", ..., metavar="MODEL")
    prefill: int = flag("Number of prefill workers.", 0, ge=0)
    decode: int = flag("Number of decode workers.", 0, ge=0)
    colocated: int = flag("Number of workers that run both phases.", 0, ge=0)
    name: str | None = flag("Unique name of this host.", unset="the hostname")
    address: str | None = flag(
        "Address of this host that other hosts can reach.", unset="the source address of packets to the service"
    )
    device: str | None = DEVICE.field(unset="that of the service")
    kv_cache_memory_bytes: int | None = KV_CACHE_MEMORY.field(unset="that of the service")
    gpu_memory_utilization: float | None = GPU_MEMORY.field(unset="that of the service")
    pin_cores: bool | None = PIN_CORES.field(unset="yes")
    log_format: str = flag("Log format.", "text", choices=LOG_FORMATS)


@command
def join(settings: JoinSettings) -> None:
    """Run workers on this host for a service on another host.

    The workers get their configuration from the service and read the model's files here. Failed workers restart. The
    workers stop with the service. After a lost connection they wait for the service or its replacement.
    """
    configure_logs(settings.log_format)
    counts = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode, Role.MIXED: settings.colocated}
    workers = {role: count for role, count in counts.items() if count}
    require(bool(workers), "give the workers of this host: --prefill N, --decode N or --colocated N")
    read_key(settings.cluster_key)  # fail before anything slow starts
    network, model = host_network(settings), find_model(settings.model)
    settings.store_config()
    offer = HostOffer(model=model_fingerprint(model), workers=workers)
    with tempfile.TemporaryDirectory(prefix=f"twofold-{os.getpid()}-", ignore_cleanup_errors=True) as run_dir:
        uvloop.run(_run(settings, network, offer, model, run_dir))


def keygen(file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; it must not exist.")]) -> None:
    """Write a new cluster key, which authenticates the hosts of a service (see `twofold join`).

    Copy FILE to each host over a secure channel: any host with the key may join.
    """
    write_key(file)
    typer.echo(f"{file}: a new cluster key that only you can read", err=True)


def host_network(settings: JoinSettings) -> HostNetwork:
    """Return the network addresses of this host and of the service. Raises ConfigurationError for invalid flags."""
    endpoint = TcpEndpoint.parse(settings.controller, "tcp://ADDRESS:PORT")
    name, address = settings.name or socket.gethostname(), settings.address
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"--name {name!r} is not valid: use up to 64 letters, digits, dots, dashes and underscores"
        )
    return HostNetwork(
        host=name,
        address=endpoint.own_address() if address is None else own_host(address, "--address"),
        key_file=str(settings.cluster_key.absolute()),
        controller=str(endpoint),
    )


def host_config(config: ServiceConfig, settings: JoinSettings, network: HostNetwork, model: Path) -> ServiceConfig:
    """Return the service's configuration, adapted to this host's model files, devices, cores and KV store."""
    share = settings.gpu_memory_utilization
    engine = msgspec.structs.replace(
        config.engine,
        model=str(model),
        tokenizer=None,
        device=settings.device or config.engine.device,
        kv_cache_bytes=settings.kv_cache_memory_bytes or (None if share else config.engine.kv_cache_bytes),
        gpu_memory_utilization=share or config.engine.gpu_memory_utilization,
        eviction=settings.kv_eviction or config.engine.eviction,
    )
    return msgspec.structs.replace(
        config,
        engine=engine,
        workers=with_cores(config.workers, pin_cores=settings.pin_cores is not False),
        network=network,
        log_format=settings.log_format,
        store=settings.store_config(),
    )


async def _run(settings: JoinSettings, network: HostNetwork, offer: HostOffer, model: Path, run_dir: str) -> None:
    host = JoinedHost(
        network,
        offer,
        lambda config: host_config(config, settings, network, model),
        lambda what: print(f"twofold: {what}", file=sys.stderr, flush=True),  # noqa: T201  (progress, for people)
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, host.stop)
    await host.run(run_dir)
