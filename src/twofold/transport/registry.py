"""The transports by name. They import torch; this module does not, so that a command line can be checked with it."""

from importlib.util import find_spec
from typing import NamedTuple

from twofold.errors import ConfigurationError


class TransportEntry(NamedTuple):
    """Where a transport is, and what it needs beyond the default installation: one of `packages`, from `extra`."""

    module: str
    name: str
    packages: tuple[str, ...] = ()
    extra: str = ""


TRANSPORTS = {
    "shared_memory": TransportEntry("twofold.transport.shared_memory", "SharedMemoryTransport"),
    "curve": TransportEntry("twofold.transport.curve", "CurveTransport"),
    "nixl": TransportEntry("twofold.transport.nixl", "NixlTransport", ("nixl_cu12", "nixl_cu13"), "nixl"),
    "mooncake": TransportEntry("twofold.transport.mooncake", "MooncakeTransport", ("mooncake",), "mooncake"),
}

DEFAULT_TRANSPORT = "shared_memory"


def check_transport(name: str) -> None:
    """Raises ConfigurationError for a transport that is unknown, or not installed."""
    if name not in TRANSPORTS:
        raise ConfigurationError(f"--transport {name!r} is unknown: choose one of {', '.join(TRANSPORTS)}")
    entry = TRANSPORTS[name]
    if entry.packages and not any(find_spec(package) for package in entry.packages):
        raise ConfigurationError(
            f"--transport {name} needs a package that is not installed: pip install 'twofold[{entry.extra}]'"
        )
