"""A cluster of CPU workers on one host, with the gateway and its clients beside them.

Workers on the same core take turns, and each request and each streamed token costs CPU time on a core that a worker
may be using. The times come from a `HostProfile`.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from twofold.cluster.cores import gateway_cores, share_cores
from twofold.cluster.timing import RunTiming, ps
from twofold.instance import Role
from twofold.performance.host_profile import COLD_AFTER_S, GatewayTimes, HostProfile
from twofold.request import Request
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.queues import RunningBatch, StepResult
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.instance import SimulatedInstance
from twofold.simulation.kernel import Event, EventOrder, Host, HostCores, HostTask, Kernel
from twofold.simulation.observers.base import Observer
from twofold.simulation.statistics import RunStatistics, SimulatedRequest


class HostedCluster(VirtualCluster):
    """A virtual cluster on one host: requests and tokens pass a gateway that takes its time.

    `workers` are the names and roles of its instances in order; `cores` has their shares of the host.
    """

    def __init__(
        self,
        profile: HostProfile,
        workers: Sequence[tuple[str, Role]],
        kernel: Kernel,
        scheduler: ClusterScheduler,
        statistics: RunStatistics,
        observers: Sequence[Observer],
    ) -> None:
        super().__init__(kernel, scheduler, statistics, observers)
        everywhere = range(profile.cores)
        shares = share_cores(everywhere, len(workers))
        host = Host(kernel, profile.cores)
        pinned = [(role, share) for (_, role), share in zip(workers, shares, strict=True)]
        self._gateway = SimulatedGateway(kernel, host, gateway_cores(everywhere, pinned), profile.front)
        cold, cold_after = ps(profile.engine.cold_s), ps(COLD_AFTER_S)
        self.cores = {
            name: HostCores(host, share, profile.prefill, profile.decode, cold, cold_after)
            for (name, _), share in zip(workers, shares, strict=True)
        }
        self._first_seen: dict[str, int] = {}
        self._streaming = _Streaming(self)  # the tokens of the last iteration

    def enter(self, request: Request, number: int, arrived: int) -> None:
        self._gateway.submit(_Entering(self, request, number, arrived), request.prompt_tokens)

    def entered(self, entering: "_Entering") -> None:
        super().enter(entering.request, entering.number, entering.arrived)

    def ran(self, instance: SimulatedInstance, batch: RunningBatch, timing: RunTiming, count: int) -> None:
        super().ran(instance, batch, timing, count)
        self._streaming = _Streaming(self)
        self._gateway.stream(self._streaming, _sampled(batch))

    def stepped(self, instance: SimulatedInstance, results: list[StepResult]) -> None:
        self._streaming.firsts = [self.requests[result.sequence.id] for result in results if result.index == 0]
        super().stepped(instance, results)

    def record(self, life: SimulatedRequest) -> None:
        self._streaming.ended.append(life)

    def streamed(self, firsts: list[SimulatedRequest], ended: list[SimulatedRequest]) -> None:
        """The tokens of an iteration have reached the clients."""
        now = self.kernel.now
        for life in firsts:
            self._first_seen[life.id] = now
        for life in ended:
            life.first_token = self._first_seen.pop(life.id)
            life.last_token = now
            super().record(life)


class SimulatedGateway:
    """The gateway and the clients on its host: one chore after another, on cores that workers may be using."""

    def __init__(self, kernel: Kernel, host: Host, cores: Sequence[int], times: GatewayTimes) -> None:
        self._kernel, self._host = kernel, host
        self._task = HostTask(cores)
        self._queue: deque[_Chore] = deque()
        self._request, self._prompt_token = ps(times.request_s), ps(times.prompt_token_s)
        self._request_delay = ps(times.request_delay_s)
        self._step, self._token = ps(times.step_s), ps(times.token_s)
        self._step_delay = ps(times.step_delay_s)

    def submit(self, chore: "_Chore", prompt_tokens: int) -> None:
        """Pass a request on to a worker."""
        self._add(chore, self._request + self._prompt_token * prompt_tokens, self._request_delay)

    def stream(self, chore: "_Chore", tokens: int) -> None:
        """Stream the tokens of an iteration to their clients."""
        self._add(chore, self._step + self._token * tokens, self._step_delay)

    def _add(self, chore: "_Chore", work: int, delay: int) -> None:
        chore.gateway, chore.work, chore.delay = self, work, delay
        self._queue.append(chore)
        if len(self._queue) == 1:
            self._host.begin(self._task, work, chore)

    def done(self, chore: "_Chore") -> None:
        """Begin the next chore; the result of this one arrives after its delay."""
        self._queue.popleft()
        if self._queue:
            self._host.begin(self._task, self._queue[0].work, self._queue[0])
        self._kernel.schedule(self._kernel.now + chore.delay, chore.order, _arrive, chore)


def _arrive(chore: "_Chore") -> None:
    chore.arrive()


class _Chore(Event):
    """Work of the gateway; its result arrives `delay` picoseconds after it is done."""

    __slots__ = ("delay", "gateway", "work")

    gateway: SimulatedGateway
    work: int
    delay: int

    def happen(self) -> None:
        self.gateway.done(self)

    @abstractmethod
    def arrive(self) -> None: ...


class _Entering(_Chore):
    """A request on its way from its client to a worker."""

    __slots__ = ("arrived", "cluster", "number", "request")

    def __init__(self, cluster: HostedCluster, request: Request, number: int, arrived: int) -> None:
        self.order = EventOrder.ARRIVAL + number
        self.cluster, self.request, self.number, self.arrived = cluster, request, number, arrived

    def arrive(self) -> None:
        self.cluster.entered(self)


class _Streaming(_Chore):
    """Tokens on their way to clients: the first tokens of `firsts` and the last of `ended` among them."""

    __slots__ = ("cluster", "ended", "firsts")

    def __init__(self, cluster: HostedCluster) -> None:
        self.order = EventOrder.ARRIVAL
        self.cluster = cluster
        self.firsts: list[SimulatedRequest] = []
        self.ended: list[SimulatedRequest] = []

    def arrive(self) -> None:
        self.cluster.streamed(self.firsts, self.ended)


def _sampled(batch: RunningBatch) -> int:
    """Tokens sampled by an iteration."""
    return batch.decode_sequences + sum(chunk.samples for chunk in batch.prefills)
