"""Connect to a Ray cluster and list its nodes."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.security.network import TcpEndpoint

_ACCELERATOR: Final = "accelerator_type:"  # prefix of Ray's accelerator resources
Bundle = Mapping[str, float]  # amounts by resource, allocated together on one node


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """Live node of a Ray cluster, with the total and the free amount of each resource."""

    id: str
    address: str
    labels: dict[str, str] = {}
    total: dict[str, float] = {}
    free: dict[str, float] = {}

    @property
    def accelerator(self) -> str | None:
        """Ray's name of the node's accelerator type, such as H100; None for a node without accelerators."""
        named = (name.removeprefix(_ACCELERATOR) for name in self.total if name.startswith(_ACCELERATOR))
        return next(named, None)

    @property
    def accelerators(self) -> int:
        return int(self.total.get("GPU", 0))

    def has_room(self, bundle: Bundle) -> bool:
        return all(self.free.get(name, 0.0) >= amount for name, amount in bundle.items())


def list_nodes(ray: Any, *, with_room: bool = False) -> tuple[RayNode, ...]:  # noqa: ANN401  (the module, which has no types)
    """Return the live nodes, sorted by id. Free resources are included only if `with_room` is set."""
    free: dict[str, dict[str, float]] = {}
    if with_room:
        from ray._private.state import available_resources_per_node  # noqa: PLC0415  (an extra)

        free = available_resources_per_node()
    nodes = (
        RayNode(
            id=each["NodeID"],
            address=each["NodeManagerAddress"],
            labels=dict(each.get("Labels") or {}),
            total=dict(each["Resources"]),
            free=dict(free.get(each["NodeID"], {})),
        )
        for each in ray.nodes()
        if each["Alive"]
    )
    return tuple(sorted(nodes, key=lambda node: node.id))


AUTO_ADDRESS: Final = "auto"
_PROBE_S: Final = 5.0


def connect(address: str, what: str) -> Any:  # noqa: ANN401  (the module, which has no types)
    """Connect this process to the Ray cluster at `address`, and return the `ray` module.

    Raises ConfigurationError if Ray or the cluster is unavailable. `what` is the name, for error messages,
    of the feature that needs Ray.
    """
    # `address` is HOST:PORT, `auto`, `local`, or ray://HOST:PORT for Ray's client.
    try:
        import ray  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise ConfigurationError(f"{what} needs Ray, which is not installed: pip install 'twofold[ray]'") from error
    if ray.is_initialized():  # by an earlier call
        return ray
    if address != AUTO_ADDRESS and ":" in address and "://" not in address:
        _probe(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ImportError, ValueError, RuntimeError) as error:  # Ray's client is another package
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigurationError(f"no Ray cluster at {address}: {reason}") from error
    return ray


def head_endpoint(address: str) -> TcpEndpoint:
    """Return the endpoint of a Ray cluster's head node. Raises ConfigurationError for a wrong address or no cluster."""
    found = _known_here() if address == AUTO_ADDRESS else address
    if "://" in found:
        raise ConfigurationError(
            f"{found} is an address of Ray's client: use HOST:PORT of the cluster's head, on a host of the cluster "
            "(ray start --address HOST:PORT --num-cpus 0 adds a host that runs no workers)"
        )
    try:
        return TcpEndpoint.parse(f"tcp://{found}", "the Ray cluster")
    except ConfigurationError:
        raise ConfigurationError(f"{found!r} is not a Ray address: expected auto, or HOST:PORT of the head") from None


def _known_here() -> str:
    """Return the address of the cluster that `ray.init` would choose on this host."""
    named = os.environ.get("RAY_ADDRESS")
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108  (Ray's place)
    try:
        return named or file.read_text().strip()
    except OSError:
        raise ConfigurationError(
            "no Ray cluster found on this host: set --ray-address HOST:PORT, or start one with ray start --head"
        ) from None


def _probe(address: str) -> None:
    """Raise ConfigurationError if the cluster's head is unreachable."""
    head = head_endpoint(address)  # `ray.init` would retry for a long time
    try:
        socket.create_connection((head.host.strip("[]"), head.port), _PROBE_S).close()
    except OSError as error:
        raise ConfigurationError(f"no Ray cluster at {address}: {error.strerror or error}") from error
