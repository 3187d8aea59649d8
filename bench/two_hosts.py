"""Emulation of two hosts by network namespaces, with a rate-limited link that can be cut. Needs root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from twofold.errors import ConfigurationError

# Token bucket size; must hold the kernel's largest packet (64 KiB).
BURST = "128kb"
QUEUE = "20ms"


class TwoHosts:
    """Two emulated hosts: network namespaces, link devices and addresses."""

    def __init__(self, *, first_local: bool) -> None:
        number = os.getpid()
        self.names = (None if first_local else f"twofold-{number}-a", f"twofold-{number}-b")
        self.devices = (f"tf{number}a", f"tf{number}b")
        # Address range reserved for benchmarks (RFC 2544).
        net = f"198.{18 + number % 2}.{number // 2 % 256}"
        self.addresses = (f"{net}.1", f"{net}.2")

    def command(self, host: int, command: list[str]) -> list[str]:
        """Return `command` wrapped to run on one of the two hosts."""
        name = self.names[host]
        return command if name is None else ["ip", "netns", "exec", name, *command]

    def limit(self, bits_per_s: int) -> None:
        """Limit the bandwidth of the link in each direction."""
        for host, device in enumerate(self.devices):
            rate = ["tbf", "rate", f"{bits_per_s}bit", "burst", BURST, "latency", QUEUE]
            _run(self.command(host, ["tc", "qdisc", "replace", "dev", device, "root", *rate]))

    def cut(self) -> None:
        """Cut the link: drop all packets without notifying either host."""
        for host, device in enumerate(self.devices):
            lose = ["pfifo", "limit", "0"]
            _run(self.command(host, ["tc", "qdisc", "replace", "dev", device, "root", *lose]))

    def restore(self) -> None:
        """Restore the link at full bandwidth after a cut or a limit."""
        for host, device in enumerate(self.devices):
            _run(self.command(host, ["tc", "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "1000"]))


@contextmanager
def two_hosts(*, first_local: bool = False) -> Iterator[TwoHosts]:
    """Create two emulated hosts; delete them on exit. Raises ConfigurationError if a network command fails."""
    hosts = TwoHosts(first_local=first_local)
    try:
        for name in hosts.names:
            if name is not None:
                _run(["ip", "netns", "add", name])
        ends = [
            ["name", device, *([] if name is None else ["netns", name])]
            for name, device in zip(hosts.names, hosts.devices, strict=True)
        ]
        _run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
        for host, (device, address) in enumerate(zip(hosts.devices, hosts.addresses, strict=True)):
            _run(hosts.command(host, ["ip", "address", "add", f"{address}/24", "dev", device]))
            for each in (device, "lo"):
                _run(hosts.command(host, ["ip", "link", "set", each, "up"]))
        yield hosts
    finally:
        for name in hosts.names:  # also deletes the link
            if name is not None:
                end = ["ip", "netns", "delete", name]
                subprocess.run(end, capture_output=True, check=False)


def _run(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"{command[0]} is not installed: install iproute2")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigurationError(f"cannot create network namespaces: {' '.join(command)}: {done.stderr.strip()}")
