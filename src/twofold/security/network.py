"""Where a process is among several hosts, and how it reaches the others."""

import re
import socket

import msgspec

from twofold.errors import ConfigurationError

HOME = ""  # the name of the host that the service runs on
_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


class HostNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """One host of a service of several: its name, the address that others reach it at, and where its key lies.

    `controller` is the address of the controller's inbox.
    """

    host: str
    address: str
    key_file: str
    controller: str


class TcpEndpoint(msgspec.Struct, frozen=True):
    """`tcp://HOST:PORT`; HOST as it is written there, so in brackets where it is an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, flag: str) -> "TcpEndpoint":
        """Raises ConfigurationError for what names no host and port."""
        match = _ADDRESS.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise ConfigurationError(f"{flag} {text!r} is no address: write tcp://ADDRESS:PORT")
        return cls(match["host"], int(match["port"]))

    def own_address(self) -> str:
        """The address of this host that its packets to there come from; raises ConfigurationError."""
        try:
            family, kind, *_, address = socket.getaddrinfo(
                self.host.strip("[]"), self.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing: it only picks the way
                found = str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigurationError(f"there is no way to {self}: {error.strerror or error}") from error
        return f"[{found}]" if ":" in found else found


def own_host(host: str, flag: str) -> str:
    """The number of this host, where it is given by name: sockets are bound to numbers.

    Raises ConfigurationError for a name that has none, and for what means every address: nobody can call that.
    """
    if host in {"*", "0.0.0.0", "[::]"}:  # noqa: S104  (it is refused here)
        raise ConfigurationError(
            f"{flag} {host} names no host: write the address of this one that the others reach"
        )
    try:
        found = str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigurationError(f"{flag} {host} is not known here: {error.strerror or error}") from error
    return f"[{found}]" if ":" in found else found
