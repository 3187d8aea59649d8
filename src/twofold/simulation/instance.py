"""A virtual instance: the live scheduler, with a performance model in the place of an engine."""

from abc import ABC, abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.instance import InstanceLoad, Role
from twofold.scheduling.instance import InstanceScheduler
from twofold.scheduling.iteration import StartedIteration, Step
from twofold.simulation.agenda import Event
from twofold.simulation.kernel import Kernel, Order
from twofold.simulation.network import Link
from twofold.simulation.product import product
from twofold.simulation.timing import Pace, Timing

# Energy is summed in two parts, because compiled code is quick with integers below 2⁶² only (and multiplies those
# below 2³⁰): of each duration the part in whole units of 2²⁰ ps, and the rest.
_UNIT: Final = 20
_REST: Final = (1 << _UNIT) - 1


@mypyc_attr(allow_interpreted_subclasses=True)
class World(ABC):
    """What an instance reports to."""

    @abstractmethod
    def started(self, iteration: StartedIteration, end: int) -> None: ...

    @abstractmethod
    def ran(
        self, instance: "VirtualInstance", iteration: StartedIteration, pace: Pace, count: int
    ) -> None: ...

    @abstractmethod
    def stepped(self, instance: "VirtualInstance", steps: list[Step]) -> None: ...

    @abstractmethod
    def idle(self, instance: "VirtualInstance") -> None: ...


class VirtualInstance:
    """Runs what its scheduler starts, as many iterations at a time as the scheduler lets stand.

    `max_run` limits how many; with 1 every iteration is an event of its own, which gives the same results and
    takes longer. `busy` is the time in which a batch ran, in picoseconds; `energy` is in milliwatt-picoseconds
    on top of idle.
    """

    def __init__(
        self,
        name: str,
        number: int,
        link: Link,
        pool: int,
        role: Role,
        scheduler: InstanceScheduler,
        timing: Timing,
        kernel: Kernel,
        world: World,
        max_run: int,
    ) -> None:
        self.name, self.number, self.link, self.pool, self.role = name, number, link, pool, role
        self.scheduler = scheduler
        self.timing = timing
        self.load: InstanceLoad | None = None
        self.iteration: StartedIteration | None = None
        self.started_at = 0
        self.milliwatts = timing.idle_mw
        self.busy = 0
        self._energy = self._energy_rest = 0
        self.iterations = 0
        self.sequence_time = 0
        self._pace: Pace | None = None
        self._count = 0  # iterations that will have been run when the completion scheduled last comes
        self._limit = max_run
        self._version = 0
        self._cut = False
        self._kernel = kernel
        self._world = world

    @property
    def energy(self) -> int:
        return (self._energy << _UNIT) + self._energy_rest

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
        self._version += 1
        self.milliwatts = 0

    def revive(self, scheduler: InstanceScheduler) -> None:
        self.scheduler = scheduler
        self.milliwatts = self.timing.idle_mw

    def _begin(self) -> None:
        kernel = self._kernel
        iteration = self.scheduler.start(kernel.now)
        if iteration is None:
            self.milliwatts = self.timing.idle_mw
            self._world.idle(self)
            return
        pace = self.timing.pace(iteration)
        count = min(self._limit, iteration.limit)
        self.iteration, self._pace, self._count = iteration, pace, count
        self.started_at = kernel.now
        self.milliwatts = pace.milliwatts
        self._cut = False
        end = kernel.now + pace.end_ps(count)
        self._version += 1
        kernel.add(_Completion(end, self, self._version))
        self._world.started(iteration, end)

    def _cut_short(self) -> None:
        """End at the next boundary between iterations: what came meanwhile may join there."""
        pace, kernel = self._pace, self._kernel
        assert pace is not None  # noqa: S101  (there is an iteration; tells the type checker so)
        self._cut = True
        count = pace.under_way(kernel.now - self.started_at)
        if count < self._count:
            self._count = count
            self._version += 1
            end = self.started_at + pace.end_ps(count)
            kernel.add(_Completion(end, self, self._version))

    def complete(self, version: int) -> None:
        """The run that was under way as number `version` has come to its end."""
        if version != self._version:
            return  # cut short, or dead, since
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
        self.busy += duration
        milliwatts = pace.milliwatts - self.timing.idle_mw
        self._energy += (duration >> _UNIT) * milliwatts
        self._energy_rest += (duration & _REST) * milliwatts
        self.sequence_time += product(duration, iteration.decode_sequences + iteration.prefill_sequences)


@mypyc_attr(free_list_len=1)
class _Completion(Event):
    """The end of a run of iterations, unless it was cut short, or died, since."""

    __slots__ = ("instance", "version")

    def __init__(self, at: int, instance: VirtualInstance, version: int) -> None:
        super().__init__(at, Order.COMPLETION + instance.number)
        self.instance = instance
        self.version = version

    def happen(self) -> None:
        self.instance.complete(self.version)
