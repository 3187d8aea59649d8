"""A cluster whose workers run on the cores of one host, with the gateway and its clients beside them.

What a service on accelerators does not notice decides here: workers that share a core take turns, and every request and
every token that is streamed costs CPU time on a core that a worker may be using. The times are those of a
`HostProfile`.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from twofold.cluster.timing import RunTiming, ps
from twofold.performance.host_profile import COLD_AFTER_S, ContentionFactors, GatewayTimes
from twofold.request import Phase, Request
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.batch import RunningBatch, StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.host import Host, Task
from twofold.simulation.instance import VirtualInstance
from twofold.simulation.kernel import Event, EventOrder, Kernel
from twofold.simulation.observers.base import Observer
from twofold.simulation.request import SimulatedRequest
from twofold.simulation.site import Site
from twofold.simulation.statistics import RunStatistics

_COLD_AFTER = ps(COLD_AFTER_S)


class HostedInstance(VirtualInstance):
    """A worker on cores that others may use too: its iterations take as long as its share of them makes them take."""

    def __init__(
        self,
        site: Site,
        scheduler: InstanceScheduler,
        kernel: Kernel,
        cluster: "HostedCluster",
        cores: Sequence[int],
    ) -> None:
        # One iteration at a time, because others may begin to compute in the middle of any.
        super().__init__(site, scheduler, kernel, cluster)
        self._host = cluster.host
        self._slowdowns, self._cold = cluster.slowdowns, cluster.cold
        self._task = Task(cores, len(cores))
        self.ended_at = -_COLD_AFTER - 1

    def compute(self) -> None:
        iteration = self.iteration
        assert iteration is not None  # noqa: S101  (it has just begun; tells the type checker so)
        prefill, decode = self._slowdowns
        self._task.slowdowns = prefill if iteration.prefills else decode
        self._task.phase = Phase.PREFILL if iteration.prefills else Phase.DECODE
        work = self._end.at - self.started_at
        if self.started_at - self.ended_at > _COLD_AFTER:
            work += self._cold
        self._host.begin(self._task, work, self._end)

    def die(self) -> None:
        self._host.drop(self._task)
        super().die()


class HostedCluster(VirtualCluster):
    """Requests reach the schedulers, and tokens their clients, through a gateway that needs its time.

    `slowdowns` are those of iterations with prompts and of others; `cold` is what an iteration takes longer whose
    worker had nothing to run for a while.
    """

    def __init__(
        self,
        kernel: Kernel,
        scheduler: ClusterScheduler,
        statistics: RunStatistics,
        observers: Sequence[Observer],
        host: Host,
        slowdowns: tuple[ContentionFactors, ContentionFactors],
        cold: int,
        front: "SimulatedGateway",
    ) -> None:
        super().__init__(kernel, scheduler, statistics, observers)
        self.host, self.slowdowns, self.cold, self._front = host, slowdowns, cold, front
        self._first_seen: dict[str, int] = {}
        self._streaming = _Streaming(self)  # what the last iteration brought

    def enter(self, request: Request, number: int, arrived: int) -> None:
        self._front.request(_Entering(self, request, number, arrived), request.prompt_tokens)

    def entered(self, entering: "_Entering") -> None:
        super().enter(entering.request, entering.number, entering.arrived)

    def ran(self, instance: VirtualInstance, iteration: RunningBatch, pace: RunTiming, count: int) -> None:
        assert isinstance(instance, HostedInstance)  # noqa: S101  (as all are here; tells the type checker so)
        instance.ended_at = self.kernel.now
        taken = RunTiming(self.kernel.now - instance.started_at, 0, pace.milliwatts)
        super().ran(instance, iteration, taken, count)
        self._streaming = _Streaming(self)
        self._front.tokens(self._streaming, _sampled(iteration))

    def stepped(self, instance: VirtualInstance, steps: list[StepResult]) -> None:
        self._streaming.firsts = [self.lives[step.sequence.id] for step in steps if step.index == 0]
        super().stepped(instance, steps)

    def record(self, life: SimulatedRequest) -> None:
        self._streaming.ended.append(life)

    def streamed(self, firsts: list[SimulatedRequest], ended: list[SimulatedRequest]) -> None:
        """What an iteration brought is with the clients."""
        now = self.kernel.now
        for life in firsts:
            self._first_seen[life.id] = now
        for life in ended:
            life.first_token = self._first_seen.pop(life.id)
            life.last_token = now
            super().record(life)


class SimulatedGateway:
    """The gateway, and the clients on its host: one thing after the other, on cores that workers may be using."""

    def __init__(self, kernel: Kernel, host: Host, cores: Sequence[int], times: GatewayTimes) -> None:
        self._kernel, self._host = kernel, host
        self._task = Task(cores)
        self._line: deque[_Chore] = deque()
        self._request, self._prompt_token = ps(times.request_s), ps(times.prompt_token_s)
        self._request_delay = ps(times.request_delay_s)
        self._step, self._token = ps(times.step_s), ps(times.token_s)
        self._step_delay = ps(times.step_delay_s)

    def request(self, chore: "_Chore", prompt_tokens: int) -> None:
        """Let it happen when a request has come through to a worker."""
        self._add(chore, self._request + self._prompt_token * prompt_tokens, self._request_delay)

    def tokens(self, chore: "_Chore", number: int) -> None:
        """Let it happen when so many tokens of an iteration are with their clients."""
        self._add(chore, self._step + self._token * number, self._step_delay)

    def _add(self, chore: "_Chore", work: int, delay: int) -> None:
        chore.front, chore.work, chore.delay = self, work, delay
        self._line.append(chore)
        if len(self._line) == 1:
            self._host.begin(self._task, work, chore)

    def done(self, chore: "_Chore") -> None:
        """The first in line is done, and is through after its delay; the next begins."""
        self._line.popleft()
        if self._line:
            self._host.begin(self._task, self._line[0].work, self._line[0])
        self._kernel.schedule(self._kernel.now + chore.delay, chore.order, _come_through, chore)


def _come_through(chore: "_Chore") -> None:
    chore.through()


class _Chore(Event):
    """Something that the front does; what follows from it comes `delay` picoseconds later."""

    __slots__ = ("delay", "front", "work")

    front: SimulatedGateway
    work: int
    delay: int

    def happen(self) -> None:
        self.front.done(self)

    @abstractmethod
    def through(self) -> None: ...


class _Entering(_Chore):
    """A request on its way from its client to a worker."""

    __slots__ = ("arrived", "cluster", "number", "request")

    def __init__(self, cluster: HostedCluster, request: Request, number: int, arrived: int) -> None:
        self.order = EventOrder.ARRIVAL + number
        self.cluster, self.request, self.number, self.arrived = cluster, request, number, arrived

    def through(self) -> None:
        self.cluster.entered(self)


class _Streaming(_Chore):
    """Tokens on their way to clients; those of `firsts` are their first, and those of `ended` their last."""

    __slots__ = ("cluster", "ended", "firsts")

    def __init__(self, cluster: HostedCluster) -> None:
        self.order = EventOrder.ARRIVAL
        self.cluster = cluster
        self.firsts: list[SimulatedRequest] = []
        self.ended: list[SimulatedRequest] = []

    def through(self) -> None:
        self.cluster.streamed(self.firsts, self.ended)


def _sampled(iteration: RunningBatch) -> int:
    """Tokens that an iteration makes."""
    return iteration.decode_sequences + sum(part.samples for part in iteration.prefills)
