"""A virtual instance: the live scheduler, with a performance model in the place of an engine."""

from abc import ABC, abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.cluster.timing import RunTiming
from twofold.instance import InstanceLoad
from twofold.scheduling.instance.batch import RunningBatch, StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.simulation.kernel import Event, EventOrder, Kernel
from twofold.simulation.site import Site

# Products of durations are summed in two parts, because compiled code is quick with integers below 2⁶² only (and
# multiplies those below 2³⁰): of each duration the part in whole units of 2²⁰ ps, and the rest.
_UNIT: Final = 20
_REST: Final = (1 << _UNIT) - 1


@mypyc_attr(allow_interpreted_subclasses=True)
class InstanceEnvironment(ABC):
    """What an instance reports to, and asks."""

    @abstractmethod
    def loading(self, iteration: RunningBatch, pace: RunTiming) -> RunTiming:
        """The pace of an iteration with prompts in it, when what they reuse has to be loaded."""
        ...

    @abstractmethod
    def started(self, iteration: RunningBatch, end: int) -> None: ...

    @abstractmethod
    def ran(
        self, instance: "VirtualInstance", iteration: RunningBatch, pace: RunTiming, count: int
    ) -> None: ...

    @abstractmethod
    def passed(
        self, instance: "VirtualInstance", iteration: RunningBatch, begun: int, gap: int, milliwatts: int
    ) -> None: ...

    @abstractmethod
    def stepped(self, instance: "VirtualInstance", steps: list[StepResult]) -> None: ...

    @abstractmethod
    def resumed(self, instance: "VirtualInstance") -> None:
        """Where memory grows: whoever stood still may go on again, so that others may begin."""
        ...

    @abstractmethod
    def idle(self, instance: "VirtualInstance") -> None: ...


class VirtualInstance:
    """Runs what its scheduler starts, as many iterations at a time as the scheduler lets stand.

    `max_run` limits how many; with 1 every iteration is an event of its own, which gives the same results and
    takes longer. `busy` is the time in which a batch ran, in picoseconds.
    """

    def __init__(
        self,
        site: Site,
        scheduler: InstanceScheduler,
        kernel: Kernel,
        world: InstanceEnvironment,
        max_run: int = 1,
    ) -> None:
        self.name, self.number = site.name, site.number
        self.link, self.pool, self.role = site.link, site.pool, site.role
        self.timing = timing = site.timing
        self.scheduler = scheduler
        self.load: InstanceLoad | None = None
        self.iteration: RunningBatch | None = None
        self.started_at = 0
        self.milliwatts = timing.idle_mw
        self.busy = 0
        self._energy = self._energy_rest = 0
        self._together = self._together_rest = 0
        self.iterations = 0
        self._pace: RunTiming | None = None
        self._count = 0  # iterations that will have been run when the completion scheduled last comes
        self._limit = max_run
        self._cut = False
        self._kernel = kernel
        self._world = world
        self._end = _Completion(self)

    @property
    def energy(self) -> int:
        """Milliwatt-picoseconds on top of idle."""
        return (self._energy << _UNIT) + self._energy_rest

    @property
    def sequence_time(self) -> int:
        """Picoseconds that sequences spent in batches, added up over them."""
        return (self._together << _UNIT) + self._together_rest

    def poke(self) -> None:
        """Something was said to the scheduler: begin, or cut a run short, if it has something new to run."""
        scheduler = self.scheduler
        if scheduler.changed:
            if self.iteration is None:
                self._begin()
            elif not self._cut and self._count > 1:
                self._cut_short()

    def queued(self) -> int:
        """Sequences that wait here."""
        return self.scheduler.queued

    def die(self) -> None:
        """The iteration under way is lost; those of its run that are over have happened."""
        iteration, pace = self.iteration, self._pace
        if iteration is not None and pace is not None:
            self._account(self._kernel.now)
            over = pace.under_way(self._kernel.now - self.started_at) - 1
            if over:
                self.iterations += over
                self._world.ran(self, iteration, pace, over)
            self.iteration = None
            self._forget_end()
        self.milliwatts = 0

    def revive(self, scheduler: InstanceScheduler) -> None:
        self.scheduler = scheduler
        self.milliwatts = self.timing.idle_mw

    def _begin(self) -> None:
        kernel, scheduler = self._kernel, self.scheduler
        iteration = scheduler.start(kernel.now)
        if iteration is None:
            self.milliwatts = self.timing.idle_mw
            self._world.idle(self)
            return
        pace, growth = self.timing.pace(iteration), scheduler.growth
        if iteration.prefills:
            pace = self._world.loading(iteration, pace)
        if growth is not None:
            pace = self.timing.after(growth.take_copies(), pace)
        count = min(self._limit, iteration.limit)
        self.iteration, self._pace, self._count = iteration, pace, count
        self.started_at = kernel.now
        self.milliwatts = pace.milliwatts
        self._cut = False
        self._end.at = end = kernel.now + pace.end_ps(count)
        self.compute()
        self._world.started(iteration, end)
        if growth is not None:
            self._world.resumed(self)

    def compute(self) -> None:
        """Let the end that was set happen at its time; a worker that shares its cores is given another."""
        self._kernel.add(self._end)

    def _cut_short(self) -> None:
        """End at the next boundary between iterations: what came meanwhile may join there."""
        pace, kernel = self._pace, self._kernel
        assert pace is not None  # noqa: S101  (there is an iteration; tells the type checker so)
        self._cut = True
        count = pace.under_way(kernel.now - self.started_at)
        if count < self._count:
            self._count = count
            self._forget_end()
            self._end.at = self.started_at + pace.end_ps(count)
            kernel.add(self._end)

    def _forget_end(self) -> None:
        """The end that is scheduled will not come; another one may."""
        self._end.void = True
        self._end = _Completion(self)

    def complete(self) -> None:
        """The run that is under way has come to its end."""
        iteration, pace = self.iteration, self._pace
        assert iteration is not None and pace is not None  # noqa: S101, PT018  (as above)
        self._account(self._kernel.now)
        self._world.ran(self, iteration, pace, self._count)
        self.iteration = None
        steps = self.scheduler.advance(self._count)
        self.iterations += self._count
        if steps:
            self._world.stepped(self, steps)
        if self.iteration is None:
            self._begin()

    def _account(self, now: int) -> None:
        iteration, pace = self.iteration, self._pace
        assert iteration is not None and pace is not None  # noqa: S101, PT018  (as above)
        duration = now - self.started_at
        self._spend(duration, pace.milliwatts - self.timing.idle_mw)
        self._use(duration, iteration.decode_sequences + iteration.prefill_sequences)

    def _spend(self, duration: int, milliwatts: int) -> None:
        """So many milliwatts more than idle for so long."""
        self._energy += (duration >> _UNIT) * milliwatts
        self._energy_rest += (duration & _REST) * milliwatts

    def _use(self, duration: int, sequences: int) -> None:
        """A batch of so many sequences ran for so long."""
        self.busy += duration
        self._together += (duration >> _UNIT) * sequences
        self._together_rest += (duration & _REST) * sequences


class _Completion(Event):
    """The end of a run of iterations; `void` when the run was cut short, or its instance died, since."""

    __slots__ = ("instance", "void")

    def __init__(self, instance: VirtualInstance) -> None:
        self.order = EventOrder.COMPLETION + instance.number
        self.instance = instance
        self.void = False

    def happen(self) -> None:
        if not self.void:
            self.instance.complete()
