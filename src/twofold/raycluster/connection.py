"""The way to a Ray cluster."""

import os
import socket
from pathlib import Path
from typing import Any, Final

from twofold.curve.network import Endpoint
from twofold.errors import ConfigurationError

AUTO: Final = "auto"
_PROBE_S: Final = 5.0


def connect(address: str, what: str) -> Any:  # noqa: ANN401  (the module, which has no types)
    """The `ray` module, connected, once for this process, to the cluster at `address`: HOST:PORT, `auto`,
    `local`, or ray://HOST:PORT for Ray's client.

    Raises ConfigurationError where Ray is not installed, which `what` needs, or where there is no cluster.
    """
    try:
        import ray  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise ConfigurationError(
            f"{what} needs Ray, which is not installed: pip install 'twofold[ray]'"
        ) from error
    if ray.is_initialized():  # by an earlier call
        return ray
    if address != AUTO and ":" in address and "://" not in address:
        _probe(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ImportError, ValueError, RuntimeError) as error:  # its client is another package
        raise ConfigurationError(f"no Ray cluster at {address}: {_first_line(error)}") from error
    return ray


def head_of(address: str) -> Endpoint:
    """Where the head of the cluster at `address` listens; `auto` is looked up as Ray does.

    Raises ConfigurationError for what is no address, and where no cluster is known here.
    """
    found = _known_here() if address == AUTO else address
    if "://" in found:
        raise ConfigurationError(
            f"{found} is an address of Ray's client, which is not enough: write HOST:PORT of the cluster's head, on a "
            "host that is part of the cluster (ray start --address HOST:PORT --num-cpus 0, if nothing is to run there)"
        )
    try:
        return Endpoint.parse(f"tcp://{found}", "the Ray cluster")
    except ConfigurationError:
        raise ConfigurationError(
            f"{found!r} names no Ray cluster: write auto, or HOST:PORT of its head"
        ) from None


def _known_here() -> str:
    """RAY_ADDRESS, else the cluster that was started last on this host (see the documentation of `ray.init`)."""
    named = os.environ.get("RAY_ADDRESS")
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108  (Ray's place)
    try:
        return named or file.read_text().strip()
    except OSError:
        raise ConfigurationError(
            "no Ray cluster is known here: name one with --ray-address HOST:PORT, or start one with ray start --head"
        ) from None


def _probe(address: str) -> None:
    """Ray waits long for a cluster that is not there."""
    head = head_of(address)
    try:
        socket.create_connection((head.host.strip("[]"), head.port), _PROBE_S).close()
    except OSError as error:
        raise ConfigurationError(f"no Ray cluster at {address}: {error.strerror or error}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
