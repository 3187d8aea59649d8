"""A host whose cores workers and gateway share: who runs on a core with others gets an equal share of it.

Where each worker has an accelerator to itself there is nothing to share. Workers that compute on the cores of one host
do: more of them than cores, or a gateway beside them, and each takes longer while the others run.
"""

from collections.abc import Sequence
from typing import Final

from twofold.cluster.timing import nearest
from twofold.performance.host_profile import ContentionFactors
from twofold.request import Phase
from twofold.simulation.kernel import Event, Kernel

_NONE: Final = ContentionFactors()


class Task:
    """Something that computes now and then, with so many threads on some cores; `phase` is that of what it runs."""

    def __init__(self, cores: Sequence[int], threads: int = 1, slowdowns: ContentionFactors = _NONE) -> None:
        self.cores = tuple(cores)
        self.threads = threads
        self.slowdowns = slowdowns
        self.phase: Phase | None = None
        self.left = 0.0  # picoseconds of work, at full speed, as of `since`
        self.rate = 0.0
        self.since = 0
        self.end: Event | None = None
        self.version = 0


class Host:
    """Cores, and the tasks that are busy on them."""

    def __init__(self, kernel: Kernel, cores: int) -> None:
        self._kernel = kernel
        self._cores = cores
        self._busy: dict[Task, None] = {}

    def begin(self, task: Task, work: int, end: Event) -> None:
        """`task` has `work` picoseconds of work; `end` happens when it is done."""
        task.left, task.rate, task.since, task.end = float(work), 0.0, self._kernel.now, end
        self._busy[task] = None
        self._share_anew()

    def drop(self, task: Task) -> None:
        """What `task` was doing is not finished."""
        if self._busy.pop(task, task) is None:
            task.version += 1
            self._share_anew()

    def _ended(self, argument: tuple[Task, int]) -> None:
        task, version = argument
        if task.version != version:
            return  # its speed changed since
        del self._busy[task]
        self._share_anew()
        assert task.end is not None  # noqa: S101  (it was begun; tells the type checker so)
        task.end.happen()

    def _share_anew(self) -> None:
        """Place every thread on the core, of those its task may use, where fewest run, as a kernel balances them."""
        load = [0] * self._cores
        places: dict[Task, list[int]] = {}
        for task in sorted(self._busy, key=lambda one: len(one.cores)):
            places[task] = sorted(task.cores, key=load.__getitem__)[: task.threads]
            for place in places[task]:
                load[place] += 1
        busy = sum(1 for threads in load if threads)
        for task, own in places.items():
            others = self._cores - len(own)
            crowd = (busy - len(own)) / others if others else 0.0
            share = sum(1.0 / load[place] for place in own) / len(own)
            slower = 1.0 + (task.slowdowns.crowded - 1.0) * crowd
            if share < 1.0 and self._meets_another_phase(task, own, places):
                slower *= task.slowdowns.shared
            self._pace(task, share / slower)

    def _meets_another_phase(self, task: Task, own: list[int], places: dict[Task, list[int]]) -> bool:
        """Whether one of those with whom it takes turns runs the other phase.

        A prefill and a decode that take turns empty each other's caches; two decodes read the same weights.
        """
        return any(
            other.phase is not None and other.phase is not task.phase and not set(own).isdisjoint(theirs)
            for other, theirs in places.items()
        )

    def _pace(self, task: Task, rate: float) -> None:
        if rate == task.rate:
            return
        now = self._kernel.now
        task.left -= task.rate * (now - task.since)
        task.since, task.rate = now, rate
        task.version += 1
        assert task.end is not None  # noqa: S101  (as above)
        at = now + max(1, nearest(max(0.0, task.left) / rate))
        self._kernel.schedule(at, task.end.order, self._ended, (task, task.version))
