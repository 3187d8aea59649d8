"""`twofold serve --launcher ray`: run workers as actors on the nodes of a Ray cluster."""

from pathlib import Path
from typing import Final

import msgspec

from twofold.bench.services import free_port
from twofold.cli.serve.settings import LINK_LABEL, ServeSettings
from twofold.errors import ConfigurationError
from twofold.raycluster.cluster import AUTO_ADDRESS, head_endpoint
from twofold.security.key import write_key
from twofold.security.network import HOME, HostNetwork, TcpEndpoint
from twofold.serving.config import ServiceConfig
from twofold.serving.launch.launcher import Launcher, LocalLauncher
from twofold.serving.launch.ray.launcher import HostJob, RayJob, RayLauncher

_KEY_FILE: Final = "cluster.key"


def ray_network(settings: ServeSettings) -> HostNetwork:
    """Return the network settings of this host in a Ray cluster."""
    worker_resources(settings)  # fail before anything starts
    address = head_endpoint(settings.ray_address or AUTO_ADDRESS).own_address()
    # `launcher_of` adds the cluster key and the port.
    return HostNetwork(host=HOME, address=address, key_file="", controller=str(TcpEndpoint(address, 0)))


def launcher_of(settings: ServeSettings, config: ServiceConfig) -> tuple[ServiceConfig, Launcher]:
    """Return the configuration, for Ray with the controller's TCP address, and the launcher of `--launcher`."""
    if settings.launcher != "ray":
        return config, LocalLauncher(config)
    config = _with_endpoint(config)
    return config, RayLauncher(_job(config, settings))


def worker_resources(settings: ServeSettings) -> dict[str, float]:
    """Return the Ray resources of each worker, from a flag such as `CPU=4,GPU=1`. Raises ConfigurationError."""
    text = settings.ray_resources
    if text is None:
        return {"CPU": 1.0} | ({"GPU": 1.0} if (settings.device or "").startswith("cuda") else {})
    resources: dict[str, float] = {}
    for word in text.split(","):
        name, _, number = word.strip().partition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not name or name in resources or not 0.0 < amount < float("inf"):
            raise ConfigurationError(f"--ray-resources {text!r} is not understood: write CPU=4,GPU=1")
        resources[name] = amount
    return resources


def _with_endpoint(config: ServiceConfig) -> ServiceConfig:
    network = config.network
    if network is None or network.key_file:
        return config
    key_file = Path(config.run_dir, _KEY_FILE)
    write_key(key_file)
    endpoint = TcpEndpoint(network.address, free_port(network.address.strip("[]")))
    network = msgspec.structs.replace(network, key_file=str(key_file), controller=str(endpoint))
    return msgspec.structs.replace(config, network=network)


def _job(config: ServiceConfig, settings: ServeSettings) -> RayJob:
    network = config.network
    assert network is not None  # noqa: S101  (services on Ray have one; tells the type checker)
    key = Path(network.key_file).read_text(encoding="ascii")
    model = settings.model or config.engine.model
    source, resources = Path(model).expanduser(), worker_resources(settings)
    hosts = tuple(
        HostJob(
            controller=network.controller,
            key=key,
            model=str(source.absolute()) if source.is_dir() else model,
            worker=worker.instance,
            role=worker.role,
            threads=max(1, int(resources.get("CPU", 1))),
            log_format=config.log_format,
        )
        for worker in config.workers
    )
    return RayJob(
        address=settings.ray_address or AUTO_ADDRESS,
        bundle=resources,
        link_label=settings.ray_link_label or LINK_LABEL,
        engine=config.engine,
        hosts=hosts,
    )
