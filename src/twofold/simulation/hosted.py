"""Simulated clusters behind a server or gateway whose processing time delays each request."""

from collections import deque
from collections.abc import Sequence

from twofold.cluster.layout import gateway_cores, share_cores
from twofold.cluster.profiles import InstanceSlot
from twofold.cluster.timing import RunTiming, ps
from twofold.performance.profile import MeasuredProfile
from twofold.request import Request
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.queues import RunningBatch, StepResult
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.instance import SimulatedInstance
from twofold.simulation.kernel import Action, Call, EventOrder, Host, HostCores, HostTask, Kernel
from twofold.simulation.observers.base import Observer
from twofold.simulation.statistics import RunStatistics, SimulatedRequest


class ServedCluster(VirtualCluster):
    """Simulated cluster behind a server that delays each request by `delay_s` seconds."""

    def __init__(
        self,
        delay_s: float,
        kernel: Kernel,
        scheduler: ClusterScheduler,
        statistics: RunStatistics,
        observers: Sequence[Observer],
    ) -> None:
        super().__init__(kernel, scheduler, statistics, observers)
        self._delay = ps(delay_s)

    def enter(self, request: Request, number: int, arrived: int) -> None:
        at, order = self.kernel.now + self._delay, EventOrder.ARRIVAL + number
        self.kernel.schedule(at, order, self._entered, (request, number, arrived))

    def _entered(self, arrival: tuple[Request, int, int]) -> None:
        request, number, arrived = arrival
        super().enter(request, number, arrived)


class HostedCluster(VirtualCluster):
    """Simulated cluster of CPU workers on one host, with a gateway that processes requests and tokens."""

    def __init__(
        self,
        profile: MeasuredProfile,
        slots: Sequence[InstanceSlot],
        kernel: Kernel,
        scheduler: ClusterScheduler,
        statistics: RunStatistics,
        observers: Sequence[Observer],
    ) -> None:
        super().__init__(kernel, scheduler, statistics, observers)
        # The profile has the measured times of workers and gateway.
        shared = profile.shared_host
        everywhere = range(shared.cores)
        shares = share_cores(everywhere, len(slots))
        host = Host(kernel, shared.cores)
        pinned = [(slot.profile.pool.role, share) for slot, share in zip(slots, shares, strict=True)]
        self._host, self._gateway, self._times = host, HostTask(gateway_cores(everywhere, pinned)), shared.front
        self._chores: deque[tuple[int, Call]] = deque()  # of the gateway: picoseconds of work, and its end
        # By instance name.
        self.cores = {slot.name: HostCores(host, share, profile) for slot, share in zip(slots, shares, strict=True)}
        self._first_seen: dict[str, int] = {}
        self._firsts: list[SimulatedRequest] = []  # requests with their first token in the last iteration
        self._ended: list[SimulatedRequest] = []  # requests that ended with the last iteration

    def enter(self, request: Request, number: int, arrived: int) -> None:
        times = self._times
        work = ps(times.request_s) + ps(times.prompt_token_s) * request.prompt_tokens
        order, delay = EventOrder.ARRIVAL + number, ps(times.request_delay_s)
        self._do(order, work, delay, self._entered, (request, number, arrived))

    def _entered(self, arrival: tuple[Request, int, int]) -> None:
        request, number, arrived = arrival
        super().enter(request, number, arrived)

    def ran(
        self, instance: SimulatedInstance, batch: RunningBatch, timing: RunTiming, count: int, begun: int, since: int
    ) -> None:
        super().ran(instance, batch, timing, count, begun, since)
        self._firsts, self._ended = [], []
        tokens = batch.decode_sequences + sum(chunk.samples for chunk in batch.prefills)
        work, delay = ps(self._times.step_s) + ps(self._times.token_s) * tokens, ps(self._times.step_delay_s)
        self._do(EventOrder.ARRIVAL, work, delay, self._streamed, (self._firsts, self._ended))

    def stepped(self, instance: SimulatedInstance, results: list[StepResult]) -> None:
        self._firsts.extend(self.requests[result.sequence.id] for result in results if result.index == 0)
        super().stepped(instance, results)

    def record(self, life: SimulatedRequest) -> None:
        self._ended.append(life)

    def _streamed(self, streamed: tuple[list[SimulatedRequest], list[SimulatedRequest]]) -> None:
        firsts, ended = streamed
        now = self.kernel.now
        for life in firsts:
            self._first_seen[life.id] = now
        for life in ended:
            life.first_token = self._first_seen.pop(life.id)
            life.last_token = now
            super().record(life)

    def _do(self, order: int, work: int, delay: int, action: Action, argument: object) -> None:
        # The gateway does one chore at a time. The action happens `delay` picoseconds after the end of its chore.
        self._chores.append((work, Call(order, self._done, (order, delay, action, argument))))
        if len(self._chores) == 1:
            self._host.begin(self._gateway, *self._chores[0])

    def _done(self, chore: tuple[int, int, Action, object]) -> None:
        order, delay, action, argument = chore
        self._chores.popleft()
        if self._chores:
            self._host.begin(self._gateway, *self._chores[0])
        self.kernel.schedule(self.kernel.now + delay, order, action, argument)
