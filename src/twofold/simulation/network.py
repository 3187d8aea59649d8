"""Links: KV caches on their way between machines, sharing what the machines' networks can carry."""

from twofold.cluster.timing import nearest, ps
from twofold.simulation.kernel import Event, Kernel

_PS = 1e12


class LinkPort:
    """One direction of a machine's network: what flows through it has equal shares."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.flows: dict[int, KvFlow] = {}

    @property
    def share(self) -> float:
        return self.bytes_per_s / len(self.flows)


class MachineLink:
    """A machine's way to the others, out and in, and to itself."""

    def __init__(self, bytes_per_s: float, local_bytes_per_s: float) -> None:
        self.egress, self.ingress = LinkPort(bytes_per_s), LinkPort(bytes_per_s)
        self.local_bytes_per_s = local_bytes_per_s

    def bytes_per_s(self, target: "MachineLink") -> float:
        """What one transfer to `target` gets that is alone."""
        if target is self:
            return self.local_bytes_per_s
        return min(self.egress.bytes_per_s, target.ingress.bytes_per_s)


class KvFlow:
    """Bytes on their way. `left` and `since` are as of the last change of its rate (bytes per second).

    `landed` is what happens when they are there; its order tells flows apart.
    """

    __slots__ = ("egress", "ingress", "landed", "left", "rate", "since", "version")

    def __init__(self, egress: LinkPort, ingress: LinkPort, left: float, landed: Event) -> None:
        self.egress = egress
        self.ingress = ingress
        self.left = left
        self.landed = landed
        self.rate = 0.0
        self.since = 0
        self.version = 0


class VirtualNetwork:
    """Every machine sends and receives at the speed of its own link, and divides it equally among its transfers.

    A transfer goes at the smaller of its two shares; what it leaves of the larger one is not given to others
    (max-min fairness would), which errs on the side of slow. Without `contention` each has a link of its own.
    Transfers within a machine go at its local speed and disturb nobody.
    """

    def __init__(self, kernel: Kernel, *, contention: bool, latency_s: float) -> None:
        self._kernel = kernel
        self._contention = contention
        self._latency = ps(latency_s)

    def send(self, source: MachineLink, target: MachineLink, size: int, start: int, landed: Event) -> None:
        """Send `size` bytes from machine to machine from picosecond `start` on; then let `landed` happen."""
        if self._contention and source is not target:
            flow = KvFlow(source.egress, target.ingress, float(size), landed)
            self._kernel.schedule(start + self._latency, landed.order, self._enter, flow)
            return
        duration = nearest(float(size) * _PS / source.bytes_per_s(target))
        landed.at = start + self._latency + max(1, duration)
        self._kernel.add(landed)

    def _enter(self, flow: KvFlow) -> None:
        flow.since = self._kernel.now
        flow.egress.flows[flow.landed.order] = flow
        flow.ingress.flows[flow.landed.order] = flow
        self._share_anew(flow)

    def _end(self, argument: tuple[KvFlow, int]) -> None:
        flow, version = argument
        if flow.version != version:
            return  # its rate changed since
        del flow.egress.flows[flow.landed.order]
        del flow.ingress.flows[flow.landed.order]
        self._share_anew(flow)
        flow.landed.happen()

    def _share_anew(self, changed: KvFlow) -> None:
        egress, ingress = changed.egress.flows, changed.ingress.flows
        for flow in (*egress.values(), *(f for number, f in ingress.items() if number not in egress)):
            self._pace(flow)

    def _pace(self, flow: KvFlow) -> None:
        rate = min(flow.egress.share, flow.ingress.share)
        if rate == flow.rate:
            return
        now = self._kernel.now
        flow.left -= flow.rate * (now - flow.since) / _PS
        flow.since, flow.rate = now, rate
        flow.version += 1
        end = now + max(1, nearest(max(0.0, flow.left) / rate * _PS))
        self._kernel.schedule(end, flow.landed.order, self._end, (flow, flow.version))
