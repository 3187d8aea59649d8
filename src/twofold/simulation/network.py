"""Links: KV caches on their way between machines, sharing what the machines' networks can carry."""

from collections.abc import Callable
from typing import Any

from twofold.simulation.kernel import PS, Kernel, Order, ps

Landed = Callable[[Any], None]


class Flow:
    """Bytes on their way. `left` and `since` are as of the last change of its rate (bytes per second)."""

    __slots__ = ("argument", "landed", "left", "number", "rate", "since", "source", "target", "version")

    def __init__(
        self,
        number: int,
        source: str,
        target: str,
        left: float,
        rate: float,
        since: int,
        landed: Landed,
        argument: Any,  # noqa: ANN401  (whatever `landed` takes)
        version: int = 0,
    ) -> None:
        self.number = number
        self.source = source
        self.target = target
        self.left = left
        self.rate = rate
        self.since = since
        self.landed = landed
        self.argument = argument
        self.version = version


class _Port:
    """One direction of a machine's network: what flows through it has equal shares."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.flows: dict[int, Flow] = {}

    @property
    def share(self) -> float:
        return self.bytes_per_s / len(self.flows)


class Network:
    """Every machine sends and receives at the speed of its own network, and divides each equally among its transfers.

    A transfer goes at the smaller of its two shares; what it leaves of the larger one is not given to others
    (max-min fairness would), which errs on the side of slow. Without `contention` each has a link of its own.
    Transfers within a machine take `local_bytes_per_s` and disturb nobody.
    """

    def __init__(self, kernel: Kernel, *, contention: bool, latency_s: float) -> None:
        self._kernel = kernel
        self._contention = contention
        self._latency = ps(latency_s)
        self._egress: dict[str, _Port] = {}
        self._ingress: dict[str, _Port] = {}
        self._local: dict[str, float] = {}

    def add_machine(self, machine: str, bytes_per_s: float, local_bytes_per_s: float) -> None:
        self._egress[machine], self._ingress[machine] = _Port(bytes_per_s), _Port(bytes_per_s)
        self._local[machine] = local_bytes_per_s

    def bytes_per_s(self, source: str, target: str) -> float:
        """What one transfer gets that is alone."""
        if source == target:
            return self._local[source]
        return min(self._egress[source].bytes_per_s, self._ingress[target].bytes_per_s)

    def send(
        self, number: int, source: str, target: str, size: int, start: int, landed: Landed, argument: object
    ) -> None:
        """Send `size` bytes from machine to machine from picosecond `start` on; then `landed(argument)`."""
        flow = Flow(number, source, target, float(size), 0.0, start, landed, argument)
        if self._contention and source != target:
            self._kernel.schedule(start + self._latency, Order.TRANSFER + number, self._enter, flow)
            return
        duration = self._latency + max(1, round(size * PS / self.bytes_per_s(source, target)))
        self._kernel.schedule(start + duration, Order.TRANSFER + number, landed, argument)

    def _enter(self, flow: Flow) -> None:
        flow.since = self._kernel.now
        self._egress[flow.source].flows[flow.number] = flow
        self._ingress[flow.target].flows[flow.number] = flow
        self._share_anew(flow)

    def _end(self, argument: tuple[Flow, int]) -> None:
        flow, version = argument
        if flow.version != version:
            return  # its rate changed since
        del self._egress[flow.source].flows[flow.number]
        del self._ingress[flow.target].flows[flow.number]
        self._share_anew(flow)
        flow.landed(flow.argument)

    def _share_anew(self, changed: Flow) -> None:
        egress, ingress = self._egress[changed.source].flows, self._ingress[changed.target].flows
        for flow in (*egress.values(), *(f for number, f in ingress.items() if number not in egress)):
            self._pace(flow)

    def _pace(self, flow: Flow) -> None:
        rate = min(self._egress[flow.source].share, self._ingress[flow.target].share)
        if rate == flow.rate:
            return
        now = self._kernel.now
        flow.left -= flow.rate * (now - flow.since) / PS
        flow.since, flow.rate = now, rate
        flow.version += 1
        end = now + max(1, round(max(0.0, flow.left) / rate * PS))
        self._kernel.schedule(end, Order.TRANSFER + flow.number, self._end, (flow, flow.version))
