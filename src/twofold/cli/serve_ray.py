"""The flags of `twofold serve --launcher ray`, and what starts its workers."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.raycluster.cluster import AUTO_ADDRESS, head_endpoint
from twofold.security.key import write_key
from twofold.security.network import HOME, HostNetwork, TcpEndpoint
from twofold.serving.config import ServiceConfig
from twofold.serving.launch.launcher import Launcher, LocalLauncher
from twofold.serving.launch.ray.launcher import HostJob, RayJob, RayLauncher

if TYPE_CHECKING:  # it imports this module
    from twofold.cli.serve_flags import Flags

# What starts the workers of a service that has a place for its sockets, and the service as it is started so.
Launch = Callable[[ServiceConfig], tuple[ServiceConfig, Launcher]]

LAUNCHERS: Final = ("local", "ray")
LINK_LABEL: Final = "ray.io/gpu-domain"
_KEY_FILE = "cluster.key"


class RayFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster, what each worker takes of a node there, and the label of nodes that share a fast link."""

    address: str
    bundle: dict[str, float]
    link_label: str


def ray_flags(
    launcher: str, address: str | None, resources: str | None, link_label: str | None, device: str | None
) -> RayFlags | None:
    """None where the launcher is not `ray`; raises ConfigurationError."""
    if launcher not in LAUNCHERS:
        raise ConfigurationError(f"--launcher {launcher!r} is unknown: choose one of {', '.join(LAUNCHERS)}")
    if launcher != "ray":
        for flag, value in (
            ("--ray-address", address),
            ("--ray-resources", resources),
            ("--ray-link-label", link_label),
        ):
            if value is not None:
                raise ConfigurationError(f"{flag} is for --launcher ray: give that too")
        return None
    cuda = {"GPU": 1.0} if (device or "").startswith("cuda") else {}
    return RayFlags(
        address=address or AUTO_ADDRESS,
        bundle={"CPU": 1.0} | cuda if resources is None else _bundle(resources),
        link_label=link_label or LINK_LABEL,
    )


def check_ray(flags: "Flags") -> None:
    """Raise ConfigurationError for flags that are of no use with `--launcher ray`."""
    if flags.ray is None:
        return
    given: dict[str, object] = {
        "--cluster": flags.cluster,
        "--kv-store-dram": flags.store,
        "--pin-cores": flags.pin_cores,
        "--overload": flags.overload,
        "--inline-tbt": flags.inline_tbt,
    }
    for flag, value in given.items():
        if value is not None:
            raise ConfigurationError(f"{flag} is for workers of this host: leave it out with --launcher ray")
    if flags.transport == "shared_memory":
        raise ConfigurationError(
            "--transport shared_memory ends at the host, so KV cannot travel between the nodes of a Ray cluster: "
            "use curve, nixl or mooncake"
        )


def ray_network(flags: RayFlags) -> HostNetwork:
    """Where workers join: at the address of this host that packets to the head of the cluster come from.

    The key and the port are made when the service starts (see `launch_of`).
    """
    address = head_endpoint(flags.address).own_address()
    return HostNetwork(host=HOME, address=address, key_file="", controller=str(TcpEndpoint(address, 0)))


def launch_of(flags: "Flags") -> Launch:
    """What starts the workers: a nursery here, or Ray."""

    def launch(config: ServiceConfig) -> tuple[ServiceConfig, Launcher]:
        if flags.ray is None:
            return config, LocalLauncher(config)
        config = _with_door(config)
        return config, RayLauncher(_job(config, flags.ray, flags.model or config.engine.model))

    return launch


def _with_door(config: ServiceConfig) -> ServiceConfig:
    """The service with a key and a port of its own, where the operator has given none."""
    network = config.network
    if network is None or network.key_file:
        return config
    key_file = Path(config.run_dir, _KEY_FILE)
    write_key(key_file)
    endpoint = TcpEndpoint(network.address, _free_port(network.address))
    network = msgspec.structs.replace(network, key_file=str(key_file), controller=str(endpoint))
    return msgspec.structs.replace(config, network=network)


def _job(config: ServiceConfig, flags: RayFlags, model: str) -> RayJob:
    network = config.network
    assert network is not None  # noqa: S101  (services on Ray have one; tells the type checker)
    key = Path(network.key_file).read_text(encoding="ascii")
    source = Path(model).expanduser()
    hosts = tuple(
        HostJob(
            controller=network.controller,
            key=key,
            model=str(source.absolute()) if source.is_dir() else model,
            worker=worker.instance,
            role=worker.role,
            threads=max(1, int(flags.bundle.get("CPU", 1))),
            log_format=config.log_format,
        )
        for worker in config.workers
    )
    return RayJob(
        address=flags.address,
        bundle=flags.bundle,
        link_label=flags.link_label,
        engine=config.engine,
        hosts=hosts,
    )


def _bundle(text: str) -> dict[str, float]:
    """`CPU=4,GPU=1`; raises ConfigurationError on anything else."""
    bundle: dict[str, float] = {}
    for word in text.split(","):
        name, _, number = word.strip().partition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not name or name in bundle or not 0.0 < amount < float("inf"):
            raise ConfigurationError(f"--ray-resources {text!r} is not understood: write CPU=4,GPU=1")
        bundle[name] = amount
    return bundle


def _free_port(address: str) -> int:
    """A port of this address that nobody listens on just now."""
    host = address.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])
