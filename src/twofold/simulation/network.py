"""KV transfers between machines that share network bandwidth."""

from twofold.cluster.timing import nearest, ps
from twofold.simulation.kernel import Event, Kernel

_PS = 1e12


class LinkPort:
    """One direction of a machine's network, shared equally by its flows."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.flows: dict[int, KvFlow] = {}

    @property
    def share(self) -> float:
        return self.bytes_per_s / len(self.flows)


class MachineLink:
    """The network of a machine (egress and ingress) and its local bandwidth."""

    def __init__(self, bytes_per_s: float, local_bytes_per_s: float) -> None:
        self.egress, self.ingress = LinkPort(bytes_per_s), LinkPort(bytes_per_s)
        self.local_bytes_per_s = local_bytes_per_s

    def bytes_per_s(self, target: "MachineLink") -> float:
        """Bandwidth of a single transfer to `target`."""
        if target is self:
            return self.local_bytes_per_s
        return min(self.egress.bytes_per_s, target.ingress.bytes_per_s)


class KvFlow:
    """A KV transfer in progress. `left` (bytes) and `since` are those at the last change of `rate` (bytes/s).

    `landed` is the completion event; its order identifies the flow.
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
    """Machine links shared equally among transfers.

    A transfer runs at the smaller of its egress and ingress shares. Unused bandwidth is not redistributed as under
    max-min fairness, so transfer times are upper bounds. Without `contention` every transfer has its own link.
    Transfers within a machine use its local bandwidth and do not contend.
    """

    def __init__(self, kernel: Kernel, *, contention: bool, latency_s: float) -> None:
        self._kernel = kernel
        self._contention = contention
        self._latency = ps(latency_s)

    def send(self, source: MachineLink, target: MachineLink, size: int, start: int, landed: Event) -> None:
        """Send `size` bytes starting at picosecond `start`; `landed` is scheduled for the completion."""
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
        self._update_rates(flow)

    def _end(self, argument: tuple[KvFlow, int]) -> None:
        flow, version = argument
        if flow.version != version:
            return  # superseded by a rate change
        del flow.egress.flows[flow.landed.order]
        del flow.ingress.flows[flow.landed.order]
        self._update_rates(flow)
        flow.landed.happen()

    def _update_rates(self, changed: KvFlow) -> None:
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
