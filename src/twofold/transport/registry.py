"""Names of the available transports."""

from importlib.util import find_spec
from typing import NamedTuple

from twofold.errors import ConfigurationError


class TransportEntry(NamedTuple):
    """Class name and help text of a transport, and the packages that provide it; one installed package suffices."""

    name: str
    help: str
    packages: tuple[str, ...] = ()


TRANSPORTS = {
    "shared_memory": TransportEntry("SharedMemoryTransport", "copies within one host"),
    "curve": TransportEntry("CurveTransport", "encrypted TCP between hosts"),
    "nixl": TransportEntry("NixlTransport", "NIXL with UCX: RDMA, TCP, GPU to GPU", ("nixl_cu12", "nixl_cu13")),
    "mooncake": TransportEntry("MooncakeTransport", "Mooncake's transfer engine between hosts", ("mooncake",)),
}

DEFAULT_TRANSPORT = "shared_memory"


def check_transport(name: str) -> None:
    """Raise ConfigurationError if a transport is unknown or not installed."""
    if name not in TRANSPORTS:
        raise ConfigurationError(f"--transport {name!r} is unknown: choose one of {', '.join(TRANSPORTS)}")
    entry = TRANSPORTS[name]
    if entry.packages and not any(find_spec(package) for package in entry.packages):
        raise ConfigurationError(
            f"--transport {name} needs a package that is not installed: pip install 'twofold[{name}]'"
        )
