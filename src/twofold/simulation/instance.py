"""Simulated instances: the scheduler of live instances, with a performance model in place of the engine."""

from abc import ABC, abstractmethod
from typing import Final

from mypy_extensions import i64, mypyc_attr

from twofold.cluster.profiles import InstanceSlot
from twofold.cluster.timing import PS, RunTiming, ps
from twofold.instance import InstanceLoad
from twofold.scheduling.instance.queues import RunningBatch, StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.simulation.kernel import Event, EventOrder, HostCores, Kernel, MachineLink

# Sums of products of durations have two parts, whole units of 2²⁰ ps and the rest, because compiled code is fast only
# for integers below 2⁶² (factors below 2³⁰).
_UNIT: Final = 20
_REST: Final = (1 << _UNIT) - 1
_LONG_S: Final = 3600.0  # idle time of a new instance


@mypyc_attr(allow_interpreted_subclasses=True)
class InstanceEnvironment(ABC):
    """Interface through which simulated instances report events to their cluster."""

    kernel: Kernel

    @abstractmethod
    def loading(self, batch: RunningBatch, timing: RunTiming) -> RunTiming:
        """Return the duration of a batch with loading of cached prefixes. `timing` is the duration without loading."""

    @abstractmethod
    def started(self, instance: "SimulatedInstance", batch: RunningBatch, end: int) -> None: ...

    @abstractmethod
    def ran(
        self, instance: "SimulatedInstance", batch: RunningBatch, timing: RunTiming, count: int, begun: int, since: int
    ) -> None:
        """Record that an instance ran `count` iterations of a batch, starting at picosecond `begun`.

        `since` is the picosecond at which the batch's sequences got their previous token, except for sequences that
        have just joined the batch.
        """

    @abstractmethod
    def stepped(self, instance: "SimulatedInstance", results: list[StepResult]) -> None: ...

    @abstractmethod
    def idle(self, instance: "SimulatedInstance") -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedInstance(ABC):
    """Base class of simulated instances, which record their busy time and energy."""

    def __init__(
        self, slot: InstanceSlot, link: MachineLink, scheduler: InstanceScheduler, environment: InstanceEnvironment
    ) -> None:
        self.name, self.number, self.link = slot.name, slot.number, link
        self.pool, self.role = slot.pool, slot.profile.pool.role
        self.timing = slot.profile.timing
        self.scheduler = scheduler
        self.kernel, self.environment = environment.kernel, environment
        self.load: InstanceLoad | None = None
        self.batch: RunningBatch | None = None  # the batch started last; None if idle
        self.milliwatts = self.timing.idle_mw
        self.iterations = 0
        self.busy = 0  # time of batches in picoseconds; in a pipeline, the mean over its stages
        self._energy = self._energy_rest = 0
        self._sequence_time = self._sequence_time_rest = 0

    @property
    def energy(self) -> int:
        """Energy above the idle power, in milliwatt-picoseconds (10⁻¹⁵ J)."""
        return (self._energy << _UNIT) + self._energy_rest

    @property
    def sequence_time(self) -> int:
        """Sum of the times that sequences have spent in batches, in picoseconds."""
        return (self._sequence_time << _UNIT) + self._sequence_time_rest

    @abstractmethod
    def poke(self) -> None:
        """React to new work in the scheduler: start a batch, or end the current batch after this iteration."""

    @abstractmethod
    def die(self) -> None:
        """Stop a failed instance. Unfinished iterations are lost."""

    def queued(self) -> int:
        """Return the number of waiting sequences, for routers."""
        return self.scheduler.queued

    def charge(self, duration: int, milliwatts: int, batch: RunningBatch, stages: int = 1) -> None:
        """Add a batch to the instance's busy time and energy. `milliwatts` excludes the idle power."""
        power: i64 = milliwatts  # machine integers: the duration of one batch is far below 2⁵⁰ ps
        time: i64 = duration
        self._energy += (time >> _UNIT) * power
        self._energy_rest += (time & _REST) * power
        if stages > 1:
            time //= stages  # the duration is summed over all stages
        sequences: i64 = batch.decode_sequences + batch.prefill_sequences
        self.busy += time
        self._sequence_time += (time >> _UNIT) * sequences
        self._sequence_time_rest += (time & _REST) * sequences


class VirtualInstance(SimulatedInstance):
    """Simulated instance that runs the batches of its scheduler on the virtual clock.

    One simulation event covers up to `max_run` iterations of the same batch. For CPU inference, the batches run
    on the simulated CPU cores `cores`.
    """

    def __init__(
        self,
        slot: InstanceSlot,
        link: MachineLink,
        scheduler: InstanceScheduler,
        environment: InstanceEnvironment,
        max_run: int = 1,
        cores: HostCores | None = None,
    ) -> None:
        super().__init__(slot, link, scheduler, environment)
        self._max_run = max_run if cores is None else 1
        self._cores = cores
        self._stages = self.timing.model.stages
        self._first, self._later = self.timing.stages() if self._stages > 1 else (self.timing, self.timing)
        self._idle_mw = self._first.idle_mw
        self.order = EventOrder.COMPLETION + slot.number  # event order of its runs
        self._runs = [_Run(self) for _ in range(self._stages)]  # by lane
        self._run = self._runs[0]  # of an instance with one stage
        self._running = 0  # number of active runs
        self._cut = False  # whether the run was shortened to end after the current iteration
        self._gets_cold = self.timing.model.cold_start_s(_LONG_S) > 0.0
        self._ended_at = -ps(_LONG_S)  # end of the last run
        self._free_at = [0] * self._stages
        self._last_token = [0] * self._stages  # by lane: end of its last iteration

    def poke(self) -> None:
        if self.scheduler.changed:
            if not self._running or self._stages > 1:
                self.start()
            elif not self._cut and self._run.count > 1:
                self._cut_short()

    def _cut_short(self) -> None:
        self._cut = True  # newly arrived work can join the next batch
        run = self._run
        count = run.timing.under_way(self.kernel.now - run.begun)
        if count < run.count:
            run.pending = False
            self._run = self._runs[0] = _Run(self)
            self._schedule(self._run, run.batch, run.timing, count, run.begun)

    def _schedule(self, run: "_Run", batch: RunningBatch, timing: RunTiming, count: int, begun: int) -> None:
        run.batch, run.timing, run.count, run.begun = batch, timing, count, begun
        run.at = begun + timing.end_ps(count)
        run.pending = True
        if self._cores is None:
            self.kernel.add(run)
        else:
            self._cores.compute(batch, run.at - begun, run)

    def die(self) -> None:
        now = self.kernel.now
        for run in self._runs:
            if not run.pending:
                continue
            single, milliwatts = self._stages == 1, run.timing.milliwatts - self._idle_mw
            self.charge(now - run.begun if single else run.computed(now), milliwatts, run.batch, self._stages)
            run.pending = False
            done = min(run.timing.under_way(now - run.begun), run.count) - 1 if single else 0
            if done:
                self.iterations += done
                self.environment.ran(self, run.batch, run.timing, done, run.begun, run.begun)
        if self._cores is not None:
            self._cores.drop()
        self._runs = [_Run(self) for _ in range(self._stages)]
        self._run = self._runs[0]
        self._running = 0
        self._free_at = [now] * self._stages
        self.batch = None
        self.milliwatts = 0

    def start(self) -> None:
        """Start the scheduler's next batch, if it has one and the first pipeline stage is free."""
        if self._stages > 1:
            self._start_in_pipeline()
            return
        if self._running:
            return
        now, scheduler = self.kernel.now, self.scheduler
        batch = scheduler.start(now)
        if batch is None:
            self.milliwatts = self._idle_mw
            self.environment.idle(self)
            return
        timing, swap = self.timing.batch(batch), scheduler.swap
        if batch.prefills:
            timing = self.environment.loading(batch, timing)
        if swap is not None:
            copying = self.timing.copying(swap.take_copies())
            timing = RunTiming(timing.first_ps + copying, timing.step_ps, timing.milliwatts)
        count = batch.limit
        if self._gets_cold:
            cold = ps(self.timing.model.cold_start_s((now - self._ended_at) / PS))
            if cold:
                timing, count = RunTiming(timing.first_ps + cold, 0, timing.milliwatts), 1
        if count > self._max_run:  # noqa: PLR1730  (min() takes twice as long)
            count = self._max_run
        self._cut = False
        self._running = 1
        self.batch = batch
        self.milliwatts = timing.milliwatts
        self._schedule(self._run, batch, timing, count, now)
        self.environment.started(self, batch, self._run.at)

    def _start_in_pipeline(self) -> None:
        now = self.kernel.now
        if self._running == self._stages or now < self._free_at[0]:
            return
        batch = self.scheduler.start(now)
        if batch is None:
            if not self._running:
                self.environment.idle(self)
            return
        run, first, later = self._runs[batch.lane], self._first.batch(batch), self._later.batch(batch)
        run.batch, run.timing, run.later_ps = batch, first, later.first_ps
        run.begins = pass_through(now, first.first_ps, later.first_ps, self._free_at)
        run.count, run.begun, run.at = 1, run.begins[-1], self._free_at[-1]
        run.pending = True
        self._running += 1
        self.batch = batch
        self.milliwatts += first.milliwatts - self._idle_mw
        self.kernel.add(run)
        self.environment.started(self, batch, run.at)
        self.kernel.schedule(self._free_at[0], self.order, self._entrance_free, run)
        for sequence in batch.paused:
            sequence.last_token_at = self._last_token[batch.lane]

    def complete(self, run: "_Run") -> None:
        """Complete simulated iterations, pass their results to the cluster, and start the next batch."""
        now, batch, timing, count = self.kernel.now, run.batch, run.timing, run.count
        begun = since = run.begun
        self._running -= 1
        if self._stages > 1:
            milliwatts = timing.milliwatts - self._idle_mw
            self.charge(run.computed(now), milliwatts, batch, self._stages)
            self.milliwatts -= milliwatts
            if not self._running:
                self.batch = None
            since, self._last_token[batch.lane] = self._last_token[batch.lane], now
            timing = RunTiming(now - since, 0, timing.milliwatts)
        else:
            self.charge(now - begun, timing.milliwatts - self._idle_mw, batch)
            self.batch = None
            self._ended_at = now
            if self._cores is not None:
                timing = RunTiming(now - begun, 0, timing.milliwatts)
        self.environment.ran(self, batch, timing, count, begun, since)
        results = self.scheduler.advance(count)
        self.iterations += count
        if results:
            self.environment.stepped(self, results)
        self.start()

    def _entrance_free(self, run: "_Run") -> None:
        if run.pending:  # not after a failure
            self.start()


def pass_through(now: int, first: int, later: int, free_at: list[int]) -> list[int]:
    """Return the start time of an iteration on each pipeline stage, and update `free_at`.

    The iteration takes `first` picoseconds on the first stage and `later` picoseconds on every later stage.
    `free_at` lists the times at which the stages become free, in picoseconds.
    """
    begins: list[int] = []
    at, duration = now, first
    for stage in range(len(free_at)):
        begin = max(at, free_at[stage])
        begins.append(begin)
        free_at[stage] = at = begin + duration
        duration = later
    return begins


class _Run(Event):
    __slots__ = ("batch", "begins", "begun", "count", "instance", "later_ps", "pending", "timing")

    batch: RunningBatch
    timing: RunTiming
    begins: list[int]  # start of the iteration on each pipeline stage
    begun: int
    count: int
    later_ps: int  # time on each stage after the first

    def __init__(self, instance: VirtualInstance) -> None:
        self.order = instance.order
        self.instance = instance
        self.pending = False  # false if cut short or failed: the event has no effect

    def happen(self) -> None:
        if self.pending:
            self.pending = False
            self.instance.complete(self)

    def computed(self, now: int) -> int:
        # Time of computation, summed over the pipeline stages.
        total, duration = 0, self.timing.first_ps
        for begin in self.begins:
            total += max(0, min(now - begin, duration))
            duration = self.later_ps
        return total
