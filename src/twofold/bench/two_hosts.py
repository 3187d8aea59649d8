"""Two hosts on this one: network namespaces, joined by a cable that can be slow, and be cut. Needs root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from twofold.errors import ConfigurationError

# What a token bucket lets through at once: it must hold the largest packet that the kernel hands down (64 KiB).
BURST = "128kb"
QUEUE = "20ms"


class TwoHosts:
    """Names of the namespaces (None for the one that this process is in), devices on the cable, and their addresses."""

    def __init__(self, *, first_here: bool) -> None:
        number = os.getpid()
        self.names = (None if first_here else f"twofold-{number}-a", f"twofold-{number}-b")
        self.devices = (f"tf{number}a", f"tf{number}b")
        # Of the range that is set aside for benchmarks (RFC 2544).
        net = f"198.{18 + number % 2}.{number // 2 % 256}"
        self.addresses = (f"{net}.1", f"{net}.2")

    def command(self, host: int, command: list[str]) -> list[str]:
        """`command`, as it runs on one of the hosts."""
        name = self.names[host]
        return command if name is None else ["ip", "netns", "exec", name, *command]

    def limit(self, bits_per_s: int) -> None:
        """From now on the cable carries so much in each direction."""
        for host, device in enumerate(self.devices):
            rate = ["tbf", "rate", f"{bits_per_s}bit", "burst", BURST, "latency", QUEUE]
            _run(self.command(host, ["tc", "qdisc", "replace", "dev", device, "root", *rate]))

    def cut(self) -> None:
        """From now on the cable carries nothing, and neither host is told: packets are lost on their way out."""
        for host, device in enumerate(self.devices):
            lose = ["pfifo", "limit", "0"]
            _run(self.command(host, ["tc", "qdisc", "replace", "dev", device, "root", *lose]))

    def mend(self) -> None:
        """It carries all that it can again, whatever was done to it."""
        for host, device in enumerate(self.devices):
            _run(
                self.command(
                    host, ["tc", "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "1000"]
                )
            )


@contextmanager
def two_hosts(*, first_here: bool = False) -> Iterator[TwoHosts]:
    """Raises ConfigurationError where this user, or this kernel, cannot have them.

    With `first_here` the first of them is where this process runs, which can then speak to what runs there.
    """
    hosts = TwoHosts(first_here=first_here)
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
        for name in hosts.names:  # the cable goes with one of its ends
            if name is not None:
                end = ["ip", "netns", "delete", name]
                subprocess.run(end, capture_output=True, check=False)  # noqa: S603  (ours)


def _run(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"{command[0]} is not here: install iproute2 to join two network namespaces")
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (ours)
    if done.returncode:
        raise ConfigurationError(
            f"two network namespaces cannot be had here: {' '.join(command)}: {done.stderr.strip()}"
        )
