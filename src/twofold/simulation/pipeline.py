"""A virtual instance that is a pipeline: iterations pass its stages one after the other, several of them at once."""

from collections import deque

from mypy_extensions import mypyc_attr

from twofold.scheduling.instance.batch import RunningBatch
from twofold.scheduling.instance.pipeline import PipelineScheduler
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.simulation.instance import InstanceEnvironment, VirtualInstance
from twofold.simulation.kernel import Event, EventOrder, Kernel
from twofold.simulation.site import Site


class VirtualPipeline(VirtualInstance):
    """A stage computes one iteration at a time, in the order in which they come; the next stage begins it when the
    last one is done with it and it is done with those before.

    An iteration starts when the first stage is free and a lane of the scheduler has something to run. Who waits
    before a stage leaves the one before it free, so a short iteration behind a long one, or fewer iterations than
    stages, are what leaves stages idle. `busy` is the time that stages computed, divided by their number.
    """

    def __init__(
        self, site: Site, scheduler: InstanceScheduler, kernel: Kernel, world: InstanceEnvironment
    ) -> None:
        super().__init__(site, scheduler, kernel, world)
        self._first, self._later = self.timing.stages()
        self._stages = self.timing.model.stages
        self._passages: deque[_Passage] = deque()
        self._free_at = [0] * self._stages
        self._entrance = _EntranceFree(self, 0)
        self._last_token = [0] * self._stages  # by lane: when its last iteration ended

    def poke(self) -> None:
        if self.scheduler.changed:
            self._begin()

    def die(self) -> None:
        """The iterations under way are lost."""
        now = self._kernel.now
        for passage in self._passages:
            self._account_for(passage, now)
            passage.void = True
        self._passages.clear()
        self.iteration = None
        self._entrance.void = True
        self._free_at = [now] * self._stages
        self.milliwatts = 0

    def entrance_free(self) -> None:
        """The first stage is done with an iteration."""
        self._begin()

    def _begin(self) -> None:
        now = self._kernel.now
        if now < self._free_at[0]:
            return
        iteration = self.scheduler.start(now)
        if iteration is not None:
            self._enter(iteration)
        elif not self._passages:
            self._world.idle(self)

    def _enter(self, iteration: RunningBatch) -> None:
        now, scheduler = self._kernel.now, self.scheduler
        assert isinstance(scheduler, PipelineScheduler)  # noqa: S101  (so it was built; tells the type checker)
        lane = scheduler.lane
        first, later = self._first.pace(iteration), self._later.pace(iteration)
        begins = pass_through(now, first.first_ps, later.first_ps, self._free_at)
        passage = _Passage(self, iteration, lane, begins, first.first_ps, later.first_ps, first.milliwatts)
        passage.at = self._free_at[-1]
        self._passages.append(passage)
        self.iteration = iteration
        self.milliwatts += first.milliwatts - self._first.idle_mw
        self._kernel.add(passage)
        self._entrance = _EntranceFree(self, self._free_at[0])
        self._kernel.add(self._entrance)
        self._world.started(iteration, passage.at)
        for sequence in iteration.paused:
            sequence.last_token_at = self._last_token[lane]

    def leave(self, passage: "_Passage") -> None:
        """An iteration, the oldest, has passed the last stage."""
        now, iteration, lane = self._kernel.now, passage.iteration, passage.lane
        self._passages.popleft()
        self._account_for(passage, now)
        self.milliwatts -= passage.milliwatts - self._first.idle_mw
        if not self._passages:
            self.iteration = None
        gap, self._last_token[lane] = now - self._last_token[lane], now
        self._world.passed(self, iteration, passage.begins[-1], gap, passage.milliwatts)
        steps = self.scheduler.advance()
        self.iterations += 1
        if steps:
            self._world.stepped(self, steps)
        self._begin()

    def _account_for(self, passage: "_Passage", now: int) -> None:
        """Time, energy and sequences of what its stages computed until `now`."""
        duration, iteration = passage.computed(now), passage.iteration
        self._spend(duration, passage.milliwatts - self._first.idle_mw)
        self._use(duration // self._stages, iteration.decode_sequences + iteration.prefill_sequences)


def pass_through(now: int, first: int, later: int, free_at: list[int]) -> list[int]:
    """When each stage begins an iteration that comes at picosecond `now`.

    It takes `first` on the first stage and `later` on each of the others. `free_at` says when each stage is free, and
    is changed to when it is free again.
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
class _Passage(Event):
    """An iteration on its way through the stages; it happens when it has passed the last. `begins` by stage."""

    __slots__ = ("begins", "first", "instance", "iteration", "lane", "later", "milliwatts", "void")

    def __init__(
        self,
        instance: VirtualPipeline,
        iteration: RunningBatch,
        lane: int,
        begins: list[int],
        first: int,
        later: int,
        milliwatts: int,
    ) -> None:
        self.order = EventOrder.COMPLETION + instance.number
        self.instance = instance
        self.iteration = iteration
        self.lane = lane
        self.first = first
        self.later = later
        self.milliwatts = milliwatts
        self.begins = begins
        self.void = False

    def computed(self, now: int) -> int:
        """Picoseconds that stages have computed it until `now`."""
        total, duration = 0, self.first
        for begin in self.begins:
            total += max(0, min(now - begin, duration))
            duration = self.later
        return total

    def happen(self) -> None:
        if not self.void:
            self.instance.leave(self)


class _EntranceFree(Event):
    """The first stage is free again; `void` when its instance died since."""

    __slots__ = ("instance", "void")

    def __init__(self, instance: VirtualPipeline, at: int) -> None:
        self.at = at
        self.order = EventOrder.COMPLETION + instance.number
        self.instance = instance
        self.void = False

    def happen(self) -> None:
        if not self.void:
            self.instance.entrance_free()
