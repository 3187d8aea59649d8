"""Two hosts on this one: network namespaces, joined by a cable of a given speed. Needs root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from twofold.errors import ConfigurationError

# What a token bucket lets through at once: it must hold the largest packet that the kernel hands down (64 KiB).
BURST = "128kb"
QUEUE = "20ms"
ADDRESSES = ("198.18.7.1", "198.18.7.2")  # of the range that is set aside for benchmarks (RFC 2544)


class TwoHosts:
    """Names of the namespaces, and of the device on the cable in each."""

    def __init__(self) -> None:
        self.names = (f"twofold-{os.getpid()}-a", f"twofold-{os.getpid()}-b")
        self.devices = ("cable-a", "cable-b")

    def command(self, host: int, command: list[str]) -> list[str]:
        """`command`, as it runs on one of the hosts."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def limit(self, bits_per_s: int) -> None:
        """From now on the cable carries so much in each direction."""
        for host, device in enumerate(self.devices):
            rate = ["tbf", "rate", f"{bits_per_s}bit", "burst", BURST, "latency", QUEUE]
            _run(self.command(host, ["tc", "qdisc", "replace", "dev", device, "root", *rate]))


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Raises ConfigurationError where this user, or this kernel, cannot have them."""
    hosts = TwoHosts()
    try:
        for name in hosts.names:
            _run(["ip", "netns", "add", name])
        ends = [
            ["name", device, "netns", name] for name, device in zip(hosts.names, hosts.devices, strict=True)
        ]
        _run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
        for host, (device, address) in enumerate(zip(hosts.devices, ADDRESSES, strict=True)):
            _run(hosts.command(host, ["ip", "address", "add", f"{address}/24", "dev", device]))
            for each in (device, "lo"):
                _run(hosts.command(host, ["ip", "link", "set", each, "up"]))
        yield hosts
    finally:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"{command[0]} is not here: install iproute2 to join two network namespaces")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigurationError(
            f"two network namespaces cannot be had here: {' '.join(command)}: {done.stderr.strip()}"
        )
