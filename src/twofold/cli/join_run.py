"""What `twofold join` does once its flags are read: check, ask, run workers, and leave nothing behind."""

import asyncio
import os
import re
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from twofold.cli.store_flags import check_eviction
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.security.guard import Guard
from twofold.security.key import read_key
from twofold.security.network import HostNetwork, TcpEndpoint, own_host
from twofold.serving.config import ServiceConfig, StoreConfig
from twofold.serving.launch.joined_host import HostOffer, JoinedHost
from twofold.serving.launch.model_source import find_model, model_fingerprint
from twofold.serving.launch.worker_plan import with_cores
from twofold.serving.telemetry.logs import configure_logs

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinFlags:
    """The flags of `twofold join`; None where one is not given."""

    controller: str
    cluster_key: Path
    model: str
    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    name: str | None = None
    address: str | None = None
    device: str | None = None
    kv_cache_bytes: int | None = None
    store: StoreConfig | None = None
    kv_eviction: str | None = None
    pin_cores: bool = True
    log_format: str = "text"


def run(flags: JoinFlags) -> None:
    """Run workers until the service ends, Ctrl-C or SIGTERM; raises ConfigurationError."""
    configure_logs(flags.log_format)
    counts = {Role.PREFILL: flags.prefill, Role.DECODE: flags.decode, Role.MIXED: flags.mixed}
    workers = {role: count for role, count in counts.items() if count}
    if not workers:
        raise ConfigurationError("say what workers this host brings: --prefill N, --decode N or --mixed N")
    check_eviction(flags.kv_eviction)
    read_key(flags.cluster_key)  # a mistake there is told before anything takes time
    network, model = network_of(flags), find_model(flags.model)
    offer = HostOffer(model=model_fingerprint(model), workers=workers)
    with tempfile.TemporaryDirectory(prefix=f"twofold-{os.getpid()}-", ignore_cleanup_errors=True) as run_dir:
        uvloop.run(_join(flags, network, offer, model, run_dir))


def network_of(flags: JoinFlags) -> HostNetwork:
    """Where this host is; raises ConfigurationError."""
    endpoint = TcpEndpoint.parse(flags.controller, "tcp://ADDRESS:PORT")
    name = flags.name or socket.gethostname()
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"--name {name!r} is no name: write up to 64 letters, digits, dots, dashes and underscores"
        )
    return HostNetwork(
        host=name,
        address=endpoint.own_address() if flags.address is None else own_host(flags.address, "--address"),
        key_file=str(flags.cluster_key.absolute()),
        controller=str(endpoint),
    )


def adapted(config: ServiceConfig, flags: JoinFlags, network: HostNetwork, model: Path) -> ServiceConfig:
    """The service's configuration, with what this host has of its own."""
    engine = msgspec.structs.replace(
        config.engine,
        model=str(model),
        tokenizer=None,
        device=flags.device or config.engine.device,
        kv_cache_bytes=flags.kv_cache_bytes or config.engine.kv_cache_bytes,
        eviction=flags.kv_eviction or config.engine.eviction,
    )
    workers = with_cores(config.workers, pin_cores=flags.pin_cores)
    return msgspec.structs.replace(
        config,
        engine=engine,
        workers=workers,
        network=network,
        log_format=flags.log_format,
        store=flags.store,  # of its own, or none
    )


async def _join(flags: JoinFlags, network: HostNetwork, offer: HostOffer, model: Path, run_dir: str) -> None:
    key = read_key(flags.cluster_key)
    host = JoinedHost(
        network,
        lambda context: Guard(context, key),
        offer,
        lambda config: adapted(config, flags, network, model),
        lambda what: print(f"twofold: {what}", file=sys.stderr, flush=True),  # noqa: T201  (progress, for people)
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, host.stop)
    await host.run(run_dir)
