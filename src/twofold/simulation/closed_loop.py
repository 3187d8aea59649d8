"""Closed-loop load: a fixed number of clients, each of which sends its next request after its last one has ended."""

from collections.abc import Iterable

from msgspec.structs import replace

from twofold.cluster.timing import PS, ps
from twofold.errors import require
from twofold.events import RequestSubscriber
from twofold.request import Request
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.kernel import EventOrder
from twofold.timeline import Timeline


class ClosedLoop(RequestSubscriber):
    """Simulated clients that send `requests` for `duration_s` seconds. Their arrival times have no effect.

    Pass `attach` to `simulate` as `prepare`, and no other requests.
    """

    def __init__(
        self, requests: Iterable[Request], clients: int, *, think_s: float = 0.0, duration_s: float | None = None
    ) -> None:
        """Raise ConfigurationError unless there is a client, and the think time between its requests is 0 or more."""
        require(clients >= 1, f"a closed loop needs at least one client, not {clients}")
        require(0.0 <= think_s < float("inf"), f"the think time must be at least 0 s, not {think_s:g}")
        self._requests, self._clients, self._think = iter(requests), clients, ps(think_s)
        self._until = None if duration_s is None else ps(duration_s)

    def attach(self, cluster: VirtualCluster) -> None:
        """Let every client send its first request when the simulation begins."""
        self._cluster = cluster
        cluster.events.subscribe(self)
        for _ in range(self._clients):
            self._send(cluster.kernel.now)

    def ended(self, timeline: Timeline, now: float) -> None:
        self._send(self._cluster.kernel.now + self._think)

    def rejected(self, timeline: Timeline, reason: str, now: float) -> None:
        self._send(self._cluster.kernel.now + self._think)

    def _send(self, at: int) -> None:
        if self._until is not None and at >= self._until:
            return
        request = next(self._requests, None)
        if request is not None:
            due = replace(request, arrival_s=at / PS)
            self._cluster.kernel.schedule(at, EventOrder.ARRIVAL, self._cluster.arrive, due)
