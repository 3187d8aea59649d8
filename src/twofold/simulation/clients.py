"""Arrivals that depend on the ends of earlier requests: closed loops of clients, and sessions of several turns."""

from collections import deque
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from twofold.cluster.timing import PS, ps
from twofold.errors import require
from twofold.request import Request
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.kernel import EventOrder
from twofold.simulation.observers.base import Observer
from twofold.timeline import Timeline
from twofold.workload.blocks import session_keys


class ClosedLoop(Observer):
    """Simulated clients that send `requests` for `duration_s` seconds, each its next one after its last one has ended.
    The arrival times of the requests have no effect.

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

    def _send(self, at: int) -> None:
        if self._until is not None and at >= self._until:
            return
        request = next(self._requests, None)
        if request is not None:
            require(not request.session, "sessions follow their own pace: leave out the number of clients")
            due = replace(request, arrival_s=at / PS)
            self._cluster.kernel.schedule(at, EventOrder.ARRIVAL, self._cluster.arrive, due)


class SessionOrder(Observer):
    """Requests in the order of their arrival, of which the turns of a session wait for one another.

    Iterate over it to get the turns that wait for none; this object schedules the arrivals of the others. The prompts
    of turns get the keys of their blocks of `block_tokens` tokens. Call `attach` before the simulation begins.
    """

    def __init__(self, requests: Iterable[Request], block_tokens: int) -> None:
        self._requests, self._block_tokens = iter(requests), block_tokens
        self._waiting: dict[str, deque[Request]] = {}  # later turns of each session with a turn under way
        self._ended: dict[str, int] = {}  # picoseconds at which the last turn of each other session ended

    def attach(self, cluster: VirtualCluster) -> None:
        """Follow the turns of a cluster's requests."""
        self._cluster = cluster
        cluster.events.subscribe(self)

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests:
            if not request.session:
                yield request
            elif (waiting := self._waiting.get(request.session)) is not None:
                waiting.append(request)
            else:
                self._waiting[request.session] = deque()
                ended = self._ended.pop(request.session, None)
                if ended is None or ended + ps(request.think_s) <= ps(request.arrival_s):
                    yield self._named(request)
                else:
                    self._follow(request, ended)

    def ended(self, timeline: Timeline, now: float) -> None:
        session, now_ps = timeline.request.session, self._cluster.kernel.now
        waiting = self._waiting.get(session)
        if waiting:
            self._follow(waiting.popleft(), now_ps)
        elif waiting is not None:
            del self._waiting[session]
            self._ended[session] = now_ps

    def _follow(self, request: Request, ended: int) -> None:
        at = max(ps(request.arrival_s), ended + ps(request.think_s))
        self._cluster.kernel.schedule(at, EventOrder.ARRIVAL, self._cluster.inject, self._named(request))

    def _named(self, request: Request) -> Request:
        keys = session_keys(request, request.prompt_tokens, self._block_tokens)
        return replace(request, prefix_blocks=keys)
