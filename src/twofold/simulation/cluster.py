"""Simulated cluster, which uses the same cluster scheduler as the live service."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from twofold.cluster.timing import PS, RunTiming, ps
from twofold.errors import WorkloadError
from twofold.events import RequestEvents
from twofold.instance import Role
from twofold.request import FinishReason, Request
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.queues import RunningBatch, StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.simulation.handoffs import SimulatedHandoffs
from twofold.simulation.instance import InstanceEnvironment, SimulatedInstance
from twofold.simulation.kernel import Event, EventOrder, Kernel
from twofold.simulation.observers.base import IterationRun, Observer
from twofold.simulation.overload import SimulatedOverload
from twofold.simulation.reuse import PrefixReuse
from twofold.simulation.statistics import NEVER, RunStatistics, SimulatedRequest
from twofold.timeline import Moment, Timeline

_LENGTH: Final = FinishReason.LENGTH


class _Arrival(Event):
    __slots__ = ("cluster", "request")

    def __init__(self, cluster: "VirtualCluster") -> None:
        self.order = EventOrder.ARRIVAL
        self.cluster = cluster
        self.request: Request | None = None

    def happen(self) -> None:
        if self.request is not None:
            self.cluster.arrive(self.request)


class VirtualCluster(InstanceEnvironment):
    """Simulated cluster that runs requests under the live service's schedulers."""

    def __init__(
        self, kernel: Kernel, scheduler: ClusterScheduler, statistics: RunStatistics, observers: Sequence[Observer]
    ) -> None:
        self.kernel, self.scheduler, self.statistics = kernel, scheduler, statistics
        self.instances: dict[str, SimulatedInstance] = {}
        self.handoffs: SimulatedHandoffs
        self.reuse: PrefixReuse | None = None  # set if the cluster has prefix caches
        self.capacities: dict[str, int] = {}
        self.cells: dict[str, str] = {}  # cell of each instance, if the cluster has cells
        self.new_scheduler: Callable[[str, int], InstanceScheduler]
        self.requests: dict[str, SimulatedRequest] = {}  # placed and not ended
        self.overload: SimulatedOverload | None = None  # rejects requests at arrival or after their prefill
        self.events = RequestEvents((scheduler, *observers))
        self._observers = tuple(observers)
        self._arrivals: Iterator[Request] = iter(())
        self._arrival = _Arrival(self)  # one event, reused for all arrivals
        scheduler.on_role_change = self._note_role

    # -- from outside -----------------------------------------------------------------------------------------------

    def join(self, instance: SimulatedInstance) -> None:
        """Add an idle instance to the cluster scheduler."""
        name = instance.name
        self.scheduler.add_instance(name, instance.role, self.capacities[name], self.cells.get(name, ""))
        instance.load = load = self.scheduler.pools.get(name)
        if load is not None:
            load.queued = instance.queued
            if self.reuse is not None:
                load.cache = self.reuse.cache_of(name)
        self._note_role(name, instance.role)

    def feed(self, requests: Iterable[Request]) -> None:
        """Set the requests to simulate, sorted by arrival, and schedule the first arrival."""
        self._arrivals = iter(requests)
        self._schedule_arrival(None)

    # -- arrivals ---------------------------------------------------------------------------------------------------

    def _schedule_arrival(self, before: Request | None) -> None:
        for request in self._arrivals:  # only one: compiled code iterates faster than it calls `next`
            at = ps(request.arrival_s)
            if at < self.kernel.now:  # the arrival of `before`
                late = "the run begins" if before is None else f"{before.id} at {before.arrival_s:g} s: sort it by time"
                reason = f"request {request.id} arrives at {request.arrival_s:g} s, before {late}"
                raise WorkloadError("the workload", reason)
            self._arrival.at, self._arrival.request = at, request
            self.kernel.add(self._arrival)
            return

    def arrive(self, request: Request) -> None:
        """Record the arrival of a request, process it, and schedule the next arrival."""
        self.inject(request)
        self._schedule_arrival(request)

    def inject(self, request: Request) -> None:
        """Record the arrival of a request and process it."""
        now, statistics = self.kernel.now, self.statistics
        statistics.arrive(now)
        self.events.arrived(request, now / PS)
        self.enter(request, statistics.arrived, now)

    def enter(self, request: Request, number: int, arrived: int) -> None:
        """Place or reject a request that arrived at picosecond `arrived`. Requests are numbered from 1."""
        now, statistics = self.kernel.now, self.statistics
        now_s = now / PS
        placed = self.scheduler.place(request, now_s)
        reason = None if placed is not None else "no-instance"
        if placed is not None and self.overload is not None:
            reason = self.overload.rejection(placed, now)
            if reason is not None:
                self.scheduler.withdraw(request.id)
        if placed is None or reason is not None:
            statistics.rejected += 1
            if self.events.records_timelines:
                refused = Timeline(request, {Moment.ARRIVED: arrived / PS}, finish_reason=FinishReason.ERROR)
                self.events.rejected(refused, reason or "", now_s)
            return
        route = placed.route
        prefill, decode = self.instances[route.prefill], self.instances[route.decode]
        simulated = SimulatedRequest(request, number, arrived, prefill, decode, placed.mode)
        under_way = len(self.requests)
        self.requests[simulated.id] = simulated
        if len(self.requests) == under_way:
            raise WorkloadError("the workload", f"two requests under way have the id {simulated.id}")
        self.events.placed(placed, now_s)
        if self.reuse is None:
            prefill.scheduler.submit(request, decodes_here=not simulated.splits)
        else:
            self.reuse.submit(simulated, route)
        if simulated.splits:
            self.handoffs.expect(simulated)
        prefill.poke()

    # -- InstanceEnvironment ------------------------------------------------------------------------------------------

    def loading(self, iteration: RunningBatch, pace: RunTiming) -> RunTiming:
        return pace if self.reuse is None else self.reuse.loading(iteration, pace)

    def started(self, instance: SimulatedInstance, iteration: RunningBatch, end: int) -> None:
        for part in iteration.prefills:
            if part.context_tokens and self.reuse is None:
                continue  # not the first chunk of the prompt
            life = self.requests[part.sequence.id]
            if life.prefill_started == NEVER:
                life.prefill_started = now = self.kernel.now
                self.events.prefill_started(life.id, now / PS)
                if life.splits:
                    self.handoffs.prefill_started(life, end)
        for sequence in iteration.paused:
            sequence.last_token_at = self.kernel.now
            self.requests[sequence.id].preemptions += 1
        for sequence in iteration.joined:
            life = self.requests[sequence.id]
            if life.decode_started == NEVER:
                life.decode_started = self.kernel.now
                sequence.last_token_at = life.first_token
        if instance.scheduler.swap is not None:  # paused sequences may have resumed, and leases may be due
            self.handoffs.grant(instance)

    def ran(
        self, instance: SimulatedInstance, batch: RunningBatch, timing: RunTiming, count: int, begun: int, since: int
    ) -> None:
        if batch.decode_sequences:
            self.statistics.gaps(timing, count, batch.decode_sequences, since, batch.joined)
        if not self._observers:
            return
        prefills = batch.prefill_tokens, batch.prefill_sequences
        decodes = batch.decode_sequences, batch.context_tokens
        times = begun, self.kernel.now
        run = IterationRun(instance.name, *times, count, *prefills, *decodes, timing.milliwatts / 1e3)
        for observer in self._observers:
            observer.run(run)

    def stepped(self, instance: SimulatedInstance, steps: list[StepResult]) -> None:
        now = self.kernel.now
        for step in steps:
            simulated = self.requests[step.sequence.id]
            if step.index == 0:
                simulated.first_token = now
                self.events.first_token(simulated.id, now / PS)
                if self.overload is not None and not self.overload.admits_decode(simulated.id, now):
                    self.statistics.rejected += 1
                    self._give_up(simulated)
                    simulated.decode.poke()
                    continue
            if step.finish_reason is not None:
                self._complete(simulated)
            elif step.hands_off:
                self.handoffs.prefilled(simulated)
            elif step.index:  # paused: no free memory
                step.sequence.last_token_at = now
                simulated.preemptions += 1
        self.handoffs.grant(instance)

    def idle(self, instance: SimulatedInstance) -> None:
        load = instance.load
        if load is not None and load.role is not load.home and instance.scheduler.empty:
            self.scheduler.idle(instance.name)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _complete(self, life: SimulatedRequest) -> None:
        now = self.kernel.now
        life.last_token = now
        life.ended = True
        del self.requests[life.id]
        if life.splits and life.handoff_ended == NEVER:  # the first token was the last: nothing to decode
            self.handoffs.give_up(life)
            life.decode.poke()
        self.events.finished(life.id, life.output_tokens, now / PS)
        self.record(life)

    def record(self, life: SimulatedRequest) -> None:
        """Record a completed request in the statistics, and emit its `ended` event."""
        self.statistics.complete(life, self.kernel.now)
        self._tell_ended(life, _LENGTH, life.output_tokens)

    def _give_up(self, life: SimulatedRequest) -> None:
        life.ended = True
        del self.requests[life.id]
        self.statistics.last_end = self.kernel.now
        self.handoffs.give_up(life)
        self.events.aborted(life.id, self.kernel.now / PS)
        self._tell_ended(life, FinishReason.ERROR, 0)

    def take_down(self, instance: SimulatedInstance) -> None:
        """Simulate the failure of an instance, which also fails all requests that it prefills or decodes."""
        if instance.load is None:
            return
        self.note("failure", instance.name, "down")
        held = self.scheduler.remove_instance(instance.name)
        instance.load = None
        instance.die()
        for other in self.instances.values():
            if other.load is not None:
                other.scheduler.peer_lost(instance.name)
        for request_id in held:
            self.statistics.failed += 1
            life = self.requests[request_id]
            self._give_up(life)
            for member in (life.prefill, life.decode) if life.splits else (life.prefill,):
                if member.load is not None:
                    member.poke()

    def bring_back(self, instance: SimulatedInstance) -> None:
        """Restart a failed instance with empty queues and caches."""
        if instance.load is None:
            self.note("failure", instance.name, "up again")
            epoch = instance.scheduler.leases.epoch + 1
            instance.scheduler = self.new_scheduler(instance.name, epoch)
            instance.milliwatts = instance.timing.idle_mw
            self.join(instance)

    # -- observers --------------------------------------------------------------------------------------------------

    def _tell_ended(self, life: SimulatedRequest, reason: FinishReason, output_tokens: int) -> None:
        if self.events.records_timelines:
            self.events.ended(life.timeline(reason, output_tokens), self.kernel.now / PS)

    def _note_role(self, instance: str, role: Role) -> None:
        for observer in self._observers:
            observer.role(instance, role, self.kernel.now)

    def note(self, kind: str, subject: str, detail: str) -> None:
        """Send a log entry to all observers."""
        for observer in self._observers:
            observer.note(self.kernel.now, kind, subject, detail)
