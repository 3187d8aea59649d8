"""Network addresses of the hosts of a service."""

import re
import socket

import msgspec

from twofold.errors import ConfigurationError

HOME = ""  # name of the host that runs the gateway and controller
_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


class HostNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """Network settings of one host of a service."""

    host: str
    address: str  # for other hosts
    key_file: str
    controller: str  # inbox of the controller


class TcpEndpoint(msgspec.Struct, frozen=True):
    """A TCP address, written `tcp://HOST:PORT` with IPv6 hosts in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, flag: str) -> "TcpEndpoint":
        """Parse a TCP endpoint. Raises ConfigurationError without a host or port."""
        match = _ADDRESS.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise ConfigurationError(f"invalid {flag} {text!r}: write tcp://ADDRESS:PORT")
        return cls(match["host"], int(match["port"]))

    def own_address(self) -> str:
        """Return this host's source address for packets to the endpoint. Raises ConfigurationError without a route."""
        try:
            family, kind, *_, address = socket.getaddrinfo(self.host.strip("[]"), self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing, only selects the route
                found = str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigurationError(f"no route to {self}: {error.strerror or error}") from error
        return f"[{found}]" if ":" in found else found


def own_host(host: str, flag: str) -> str:
    """Resolve a name or address of this machine to an IP address. Raises ConfigurationError, for wildcards too."""
    if host in {"*", "0.0.0.0", "[::]"}:  # noqa: S104  (refused here)
        raise ConfigurationError(f"{flag} {host} is a wildcard: use the address at which other hosts reach this one")
    try:
        found = str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigurationError(f"cannot resolve {flag} {host}: {error.strerror or error}") from error
    return f"[{found}]" if ":" in found else found
