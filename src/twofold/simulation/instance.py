"""A simulated instance: the live scheduler, with a performance model in place of an engine."""

from abc import ABC, abstractmethod
from collections import deque
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.cluster.slots import InstanceSlot
from twofold.cluster.timing import RunTiming
from twofold.instance import InstanceLoad
from twofold.scheduling.instance.batch import RunningBatch, StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.simulation.host import HostCores
from twofold.simulation.kernel import Event, EventOrder, Kernel
from twofold.simulation.network import MachineLink

# Products of durations are summed in two parts, because compiled code is fast with integers below 2⁶² only (and
# multiplies those below 2³⁰): the part in whole units of 2²⁰ ps, and the rest.
_UNIT: Final = 20
_REST: Final = (1 << _UNIT) - 1


@mypyc_attr(allow_interpreted_subclasses=True)
class InstanceEnvironment(ABC):
    """The cluster as seen by its instances: receives their events."""

    @abstractmethod
    def loading(self, batch: RunningBatch, timing: RunTiming) -> RunTiming:
        """The timing of a batch with prompts, including the load of their cached prefixes."""
        ...

    @abstractmethod
    def started(self, batch: RunningBatch, end: int) -> None: ...

    @abstractmethod
    def ran(self, instance: "SimulatedInstance", batch: RunningBatch, timing: RunTiming, count: int) -> None:
        """`count` iterations of a batch have run since `instance.started_at`."""
        ...

    @abstractmethod
    def passed(
        self, instance: "SimulatedInstance", batch: RunningBatch, begun: int, gap: int, milliwatts: int
    ) -> None:
        """A batch left a pipeline: its last stage began it at `begun`, `gap` after the previous one of its lane."""
        ...

    @abstractmethod
    def stepped(self, instance: "SimulatedInstance", results: list[StepResult]) -> None: ...

    @abstractmethod
    def resumed(self, instance: "SimulatedInstance") -> None:
        """With swap preemption: a batch has started, so paused sequences may have resumed and leases may be due."""
        ...

    @abstractmethod
    def idle(self, instance: "SimulatedInstance") -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedInstance(ABC):
    """Base of simulated instances: identity, scheduler, and accounts of time and energy.

    `busy` is the time spent running batches, in picoseconds; for a pipeline it is the mean over its stages. `batch` is
    the most recently started batch that is still running.
    """

    def __init__(
        self,
        slot: InstanceSlot,
        number: int,
        link: MachineLink,
        scheduler: InstanceScheduler,
        kernel: Kernel,
        environment: InstanceEnvironment,
    ) -> None:
        profile = slot.profile
        self.name, self.number, self.link = slot.name, number, link
        self.pool, self.role = slot.pool, profile.pool.role
        self.timing = profile.timing
        self.scheduler = scheduler
        self.kernel = kernel
        self.environment = environment
        self.load: InstanceLoad | None = None
        self.batch: RunningBatch | None = None
        self.started_at = 0
        self.milliwatts = self.timing.idle_mw
        self.iterations = 0
        self.busy = 0
        self._energy = self._energy_rest = 0
        self._sequence_time = self._sequence_time_rest = 0

    @property
    def energy(self) -> int:
        """Energy above idle, in milliwatt-picoseconds."""
        return (self._energy << _UNIT) + self._energy_rest

    @property
    def sequence_time(self) -> int:
        """Picoseconds that sequences spent in batches, summed over sequences."""
        return (self._sequence_time << _UNIT) + self._sequence_time_rest

    @abstractmethod
    def poke(self) -> None:
        """Look at the scheduler again after a command: start, or stop a run at the next iteration."""
        ...

    @abstractmethod
    def die(self) -> None:
        """Lose the iterations under way; completed ones of a run have happened."""
        ...

    def revive(self, scheduler: InstanceScheduler) -> None:
        self.scheduler = scheduler
        self.milliwatts = self.timing.idle_mw

    def queued(self) -> int:
        """Sequences that wait here, as reported to routers."""
        return self.scheduler.queued

    def charge(self, duration: int, milliwatts: int, batch: RunningBatch, stages: int = 1) -> None:
        """Account for a batch that stages computed for `duration` in all, with `milliwatts` above idle."""
        self._energy += (duration >> _UNIT) * milliwatts
        self._energy_rest += (duration & _REST) * milliwatts
        if stages > 1:
            duration //= stages
        sequences = batch.decode_sequences + batch.prefill_sequences
        self.busy += duration
        self._sequence_time += (duration >> _UNIT) * sequences
        self._sequence_time_rest += (duration & _REST) * sequences


class VirtualInstance(SimulatedInstance):
    """Runs the batches of an instance scheduler.

    A batch runs for as many iterations per event as it may run unchanged, at most `max_run`. `max_run` 1 gives the
    same results with one event per iteration. `cores` models a host with shared cores, which slow iterations down.

    A pipeline runs one iteration per event. It starts an iteration when the first stage is free and a lane has work.
    Each stage computes one iteration at a time, in order. An iteration that waits for a stage does not block the
    stage before it. Iterations of different lengths, or fewer iterations than stages, leave stages idle.
    """

    def __init__(
        self,
        slot: InstanceSlot,
        number: int,
        link: MachineLink,
        scheduler: InstanceScheduler,
        kernel: Kernel,
        environment: InstanceEnvironment,
        max_run: int = 1,
        cores: HostCores | None = None,
    ) -> None:
        super().__init__(slot, number, link, scheduler, kernel, environment)
        self._max_run = max_run
        self._cores = cores
        self._run: _Run | None = None  # without a pipeline
        self._cut = False
        self._stages = self.timing.model.stages
        self._first, self._later = self.timing.stages() if self._stages > 1 else (self.timing, self.timing)
        self._pipeline: deque[_Passage] = deque()
        self._free_at = [0] * self._stages
        self._entrance = _EntranceFree(self, 0)
        self._last_token = [0] * self._stages  # by lane: end of its last iteration

    def poke(self) -> None:
        if self.scheduler.changed:
            run = self._run
            if run is None:
                self.start()
            elif not self._cut and run.count > 1:
                self._cut_short(run)

    def die(self) -> None:
        now, run = self.kernel.now, self._run
        if run is not None:
            self.charge(now - self.started_at, run.timing.milliwatts - self.timing.idle_mw, run.batch)
            done = min(run.timing.under_way(now - self.started_at), run.count) - 1
            if done:
                self.iterations += done
                self.environment.ran(self, run.batch, run.timing, done)
            run.void = True
            if self._cores is not None:
                self._cores.drop()
            self._run = None
        for passage in self._pipeline:
            self._charge_passage(passage)
            passage.void = True
        self._pipeline.clear()
        self._entrance.void = True
        self._free_at = [now] * self._stages
        self.batch = None
        self.milliwatts = 0

    def start(self) -> None:
        """Start the next batch, if the first stage is free and there is one."""
        kernel, scheduler = self.kernel, self.scheduler
        if self._stages > 1 and kernel.now < self._free_at[0]:
            return
        batch = scheduler.start(kernel.now)
        if batch is None:
            if self._stages == 1:
                self.milliwatts = self.timing.idle_mw
            if not self._pipeline:
                self.environment.idle(self)
        elif self._stages > 1:
            self._enter_pipeline(batch)
        else:
            self._start_run(batch)

    # -- runs of iterations ---------------------------------------------------------------------------------------

    def _start_run(self, batch: RunningBatch) -> None:
        kernel, swap, timing = self.kernel, self.scheduler.swap, self.timing.batch(batch)
        if batch.prefills:
            timing = self.environment.loading(batch, timing)
        if swap is not None:
            timing = self.timing.after(swap.take_copies(), timing)
        count = min(self._max_run, batch.limit)
        self.batch = batch
        self.started_at = kernel.now
        self.milliwatts = timing.milliwatts
        self._cut = False
        self._run = run = _Run(self, batch, timing, count, kernel.now + timing.end_ps(count))
        if self._cores is None:
            kernel.add(run)
        else:
            self._cores.compute(batch, run.at - kernel.now, run)
        self.environment.started(batch, run.at)
        if swap is not None:
            self.environment.resumed(self)

    def _cut_short(self, run: "_Run") -> None:
        """End the run at the next iteration, which newly arrived work may join."""
        self._cut = True
        count = run.timing.under_way(self.kernel.now - self.started_at)
        if count < run.count:
            run.void = True
            end = self.started_at + run.timing.end_ps(count)
            self._run = shorter = _Run(self, run.batch, run.timing, count, end)
            self.kernel.add(shorter)

    def complete(self, run: "_Run") -> None:
        """End the run under way."""
        now, batch, timing = self.kernel.now, run.batch, run.timing
        self.charge(now - self.started_at, timing.milliwatts - self.timing.idle_mw, batch)
        if self._cores is not None:
            self._cores.ended()
            timing = RunTiming(now - self.started_at, 0, timing.milliwatts)
        self.environment.ran(self, batch, timing, run.count)
        self.batch = self._run = None
        results = self.scheduler.advance(run.count)
        self.iterations += run.count
        if results:
            self.environment.stepped(self, results)
        if self._run is None:
            self.start()

    # -- pipelines ------------------------------------------------------------------------------------------------

    def _enter_pipeline(self, batch: RunningBatch) -> None:
        now, kernel = self.kernel.now, self.kernel
        first, later = self._first.batch(batch), self._later.batch(batch)
        begins = pass_through(now, first.first_ps, later.first_ps, self._free_at)
        passage = _Passage(
            self, batch, begins, first.first_ps, later.first_ps, first.milliwatts, self._free_at[-1]
        )
        self._pipeline.append(passage)
        self.batch = batch
        self.milliwatts += first.milliwatts - self._first.idle_mw
        kernel.add(passage)
        self._entrance = _EntranceFree(self, self._free_at[0])
        kernel.add(self._entrance)
        self.environment.started(batch, passage.at)
        for sequence in batch.paused:
            sequence.last_token_at = self._last_token[batch.lane]

    def leave_pipeline(self, passage: "_Passage") -> None:
        """End the oldest batch: it has passed the last stage."""
        now, batch = self.kernel.now, passage.batch
        self._pipeline.popleft()
        self._charge_passage(passage)
        self.milliwatts -= passage.milliwatts - self._first.idle_mw
        if not self._pipeline:
            self.batch = None
        gap, self._last_token[batch.lane] = now - self._last_token[batch.lane], now
        self.environment.passed(self, batch, passage.begins[-1], gap, passage.milliwatts)
        results = self.scheduler.advance()
        self.iterations += 1
        if results:
            self.environment.stepped(self, results)
        self.start()

    def _charge_passage(self, passage: "_Passage") -> None:
        computed = passage.computed(self.kernel.now)
        self.charge(computed, passage.milliwatts - self._first.idle_mw, passage.batch, self._stages)


def pass_through(now: int, first: int, later: int, free_at: list[int]) -> list[int]:
    """The times at which each stage begins an iteration that enters at `now`, all in picoseconds.

    It takes `first` on the first stage and `later` on each of the others. Updates `free_at`, the times at which each
    stage is free.
    """
    begins: list[int] = []
    at, duration = now, first
    for stage in range(len(free_at)):
        begin = max(at, free_at[stage])
        begins.append(begin)
        free_at[stage] = at = begin + duration
        duration = later
    return begins


@mypyc_attr(free_list_len=1)
class _Run(Event):
    """The end of a run of `count` iterations; `void` if the run was cut short or its instance died."""

    __slots__ = ("batch", "count", "instance", "timing", "void")

    def __init__(
        self, instance: VirtualInstance, batch: RunningBatch, timing: RunTiming, count: int, at: int
    ) -> None:
        self.at = at
        self.order = EventOrder.COMPLETION + instance.number
        self.instance = instance
        self.batch = batch
        self.timing = timing
        self.count = count
        self.void = False

    def happen(self) -> None:
        if not self.void:
            self.instance.complete(self)


@mypyc_attr(free_list_len=1)
class _Passage(Event):
    """The end of a batch's passage through the stages, which it `begins` at these times; `void` as in `_Run`."""

    __slots__ = ("batch", "begins", "first", "instance", "later", "milliwatts", "void")

    def __init__(
        self,
        instance: VirtualInstance,
        batch: RunningBatch,
        begins: list[int],
        first: int,
        later: int,
        milliwatts: int,
        at: int,
    ) -> None:
        self.at = at
        self.order = EventOrder.COMPLETION + instance.number
        self.instance = instance
        self.batch = batch
        self.begins = begins
        self.first = first
        self.later = later
        self.milliwatts = milliwatts
        self.void = False

    def computed(self, now: int) -> int:
        """Picoseconds that stages have spent on it until `now`."""
        total, duration = 0, self.first
        for begin in self.begins:
            total += max(0, min(now - begin, duration))
            duration = self.later
        return total

    def happen(self) -> None:
        if not self.void:
            self.instance.leave_pipeline(self)


class _EntranceFree(Event):
    """The first stage of a pipeline is free; `void` if its instance died."""

    __slots__ = ("instance", "void")

    def __init__(self, instance: VirtualInstance, at: int) -> None:
        self.at = at
        self.order = EventOrder.COMPLETION + instance.number
        self.instance = instance
        self.void = False

    def happen(self) -> None:
        if not self.void:
            self.instance.start()
