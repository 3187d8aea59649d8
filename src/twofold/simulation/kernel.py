"""Event kernel of the simulator: virtual clock in whole picoseconds, event queue, network links and CPU cores. The
order of simultaneous events is fixed, so equal inputs give equal results.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

from twofold.cluster.timing import nearest, ps
from twofold.performance.profile import ContentionFactors, MeasuredProfile
from twofold.request import Phase
from twofold.scheduling.instance.queues import RunningBatch

Action = Callable[[Any], None]


class EventOrder:
    """Sort keys that order simultaneous events by kind."""

    COMPLETION: Final = 0
    TRANSFER: Final = 1 << 40
    RETRY: Final = 2 << 40
    ARRIVAL: Final = 3 << 40
    FAILURE: Final = 4 << 40
    REPLAN: Final = 5 << 40
    REPORT: Final = 6 << 40


@mypyc_attr(allow_interpreted_subclasses=True)
class Event(ABC):
    """Base class of events. An event happens at time `at` in picoseconds; `order` ranks simultaneous events."""

    __slots__ = ("at", "order")

    at: i64
    order: i64

    @abstractmethod
    def happen(self) -> None: ...


class Call(Event):
    """Event that calls `action(argument)`."""

    __slots__ = ("action", "argument")

    def __init__(self, order: int, action: Action, argument: object, at: int = 0) -> None:
        self.at = at
        self.order = order
        self.action = action
        self.argument = argument

    def happen(self) -> None:
        self.action(self.argument)


class Kernel:
    """Event loop of the simulator: a virtual clock and a sorted list of events."""

    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self.before_step: Callable[[int], int] | None = None  # called before an event; returns when to call it next
        self._queue: list[Event] = []  # next event last; faster than a heap for up to many thousands of events

    def schedule(self, at: int, order: int, action: Action, argument: object = None) -> None:
        """Schedule the call `action(argument)` at picosecond `at`. Raise ValueError for a time in the past."""
        self.add(Call(order, action, argument, at))

    def add(self, event: Event) -> None:
        """Schedule an event. Raise ValueError for a time in the past."""
        if event.at < self.now:
            raise ValueError(f"an event was scheduled {self.now - event.at} ps in the past")
        queue, at, order = self._queue, event.at, event.order
        low: i64 = 0
        high: i64 = len(queue)
        while low < high:
            middle = (low + high) >> 1
            other = queue[middle]
            if other.at > at or (other.at == at and other.order > order):
                low = middle + 1
            else:
                high = middle
        queue.insert(low, event)

    @property
    def pending(self) -> int:
        """Number of events in the queue."""
        return len(self._queue)

    def run(self, until_events: int) -> bool:
        """Run events until `until_events` have happened in total. Return False if no event is left."""
        queue, before = self._queue, self.before_step
        quiet: i64 = -1
        while queue:
            if self.events >= until_events:
                return True
            event = queue.pop()
            if before is not None and event.at > quiet:
                quiet = before(event.at)
            self.now = event.at
            self.events += 1
            event.happen()
        return False


_PS: Final = 1e12


class MachineLink:
    """Network connection of a machine: bandwidth to other machines, and bandwidth within the machine."""

    def __init__(self, network_bytes_per_s: float, local_bytes_per_s: float) -> None:
        self.network_bytes_per_s, self.local_bytes_per_s = network_bytes_per_s, local_bytes_per_s
        self.egress: dict[int, KvFlow] = {}
        self.ingress: dict[int, KvFlow] = {}

    def bytes_per_s(self, target: "MachineLink") -> float:
        """Return the bandwidth to `target` without contention, in bytes per second."""
        if target is self:
            return self.local_bytes_per_s
        return min(self.network_bytes_per_s, target.network_bytes_per_s)


class PacedWork:
    """Simulated work, such as a KV transfer, of which `left` was left when its speed last changed, at `since` (ps)."""

    __slots__ = ("end", "left", "rate", "since", "version")

    def __init__(self, left: float = 0.0, end: Event | None = None) -> None:
        self.left = left
        self.end = end
        self.rate = 0.0
        self.since = 0
        self.version = 0

    def pace(self, kernel: Kernel, rate: float, unit: float, leave: Action) -> None:
        """Set the speed of the work: `rate` of it per `unit` picoseconds. `leave` is called on completion."""
        if rate == self.rate:
            return
        now = kernel.now
        self.left -= self.rate * (now - self.since) / unit
        self.since, self.rate = now, rate
        self.version += 1
        assert self.end is not None  # noqa: S101  (work in progress has one; for the type checker)
        at = now + max(1, nearest(max(0.0, self.left) / rate * unit))
        kernel.schedule(at, self.end.order, self._complete, (self.version, leave))

    def _complete(self, argument: tuple[int, Action]) -> None:
        version, leave = argument
        if version == self.version:  # otherwise the rate has changed since
            leave(self)
            assert self.end is not None  # noqa: S101  (as above)
            self.end.happen()


class KvFlow(PacedWork):
    """KV transfer in progress between two machines; `left` is in bytes."""

    __slots__ = ("number", "source", "target")

    def __init__(self, source: MachineLink, target: MachineLink, left: float, landed: Event) -> None:
        super().__init__(left, landed)
        self.source, self.target = source, target
        self.number = landed.order  # unique


class VirtualNetwork:
    """Simulated network between machines.

    With `contention`, concurrent transfers in the same direction share a machine's bandwidth equally. Bandwidth
    that one transfer leaves unused is not given to others, so transfer times are upper bounds.
    """

    def __init__(self, kernel: Kernel, *, contention: bool, latency_s: float) -> None:
        self._kernel = kernel
        self._contention = contention
        self._latency = ps(latency_s)

    def send(self, source: MachineLink, target: MachineLink, size: int, start: int, landed: Event) -> None:
        """Send `size` bytes at the simulated time `start` (picoseconds). The event `landed` happens on completion."""
        if self._contention and source is not target:
            flow = KvFlow(source, target, float(size), landed)
            self._kernel.schedule(start + self._latency, landed.order, self._enter, flow)
            return
        duration = nearest(float(size) * _PS / source.bytes_per_s(target))
        landed.at = start + self._latency + max(1, duration)
        self._kernel.add(landed)

    def _enter(self, flow: KvFlow) -> None:
        flow.since = self._kernel.now
        flow.source.egress[flow.number] = flow.target.ingress[flow.number] = flow
        self._update_rates(flow)

    def _leave(self, flow: KvFlow) -> None:
        del flow.source.egress[flow.number]
        del flow.target.ingress[flow.number]
        self._update_rates(flow)

    def _update_rates(self, changed: KvFlow) -> None:
        egress, ingress = changed.source.egress, changed.target.ingress
        for flow in (*egress.values(), *(f for number, f in ingress.items() if number not in egress)):
            source, target = flow.source, flow.target
            # No max-min fairness.
            out = source.network_bytes_per_s / len(source.egress)
            into = target.network_bytes_per_s / len(target.ingress)
            flow.pace(self._kernel, min(out, into), _PS, self._leave)


_NONE: Final = ContentionFactors()


class HostTask(PacedWork):
    """CPU work of a worker or the gateway: `threads` threads run on the CPU cores listed in `cores`."""

    def __init__(self, cores: Sequence[int], threads: int = 1, contention: ContentionFactors = _NONE) -> None:
        super().__init__()
        self.cores = tuple(cores)
        self.threads = threads
        self.contention = contention
        self.phase: Phase | None = None  # of a worker; None for the gateway


class Host:
    """The CPU cores of a host and the tasks that run on them."""

    def __init__(self, kernel: Kernel, cores: int) -> None:
        self.kernel = kernel
        self._cores = cores
        self._busy: dict[HostTask, None] = {}

    def begin(self, task: HostTask, work: int, end: Event) -> None:
        """Start a task that takes `work` picoseconds without contention. Its completion triggers the event `end`."""
        task.left, task.rate, task.since, task.end = float(work), 0.0, self.kernel.now, end
        self._busy[task] = None
        self._share()

    def drop(self, task: HostTask) -> None:
        """Cancel a task; its end event does not happen."""
        if self._busy.pop(task, task) is None:
            task.version += 1
            self._share()

    def _leave(self, task: HostTask) -> None:
        del self._busy[task]
        self._share()

    def _share(self) -> None:
        load = [0] * self._cores
        places: dict[HostTask, list[int]] = {}
        for task in sorted(self._busy, key=lambda one: len(one.cores)):
            # The least loaded cores, as an operating system chooses them.
            places[task] = sorted(task.cores, key=load.__getitem__)[: task.threads]
            for place in places[task]:
                load[place] += 1
        busy = sum(1 for threads in load if threads)
        for task, own in places.items():
            others = self._cores - len(own)
            crowd = (busy - len(own)) / others if others else 0.0
            share = sum(1.0 / load[place] for place in own) / len(own)
            slowdown = 1.0 + (task.contention.crowded - 1.0) * crowd
            # A prefill and a decode that take turns evict each other's caches; two decodes read the same weights.
            if share < 1.0 and any(
                other.phase is not None and other.phase is not task.phase and not set(own).isdisjoint(theirs)
                for other, theirs in places.items()
            ):
                slowdown *= task.contention.shared
            task.pace(self.kernel, share / slowdown, 1.0, self._leave)


class HostCores(HostTask):
    """Simulated CPU cores on which one worker runs its model."""

    def __init__(self, host: Host, cores: Sequence[int], profile: MeasuredProfile) -> None:
        super().__init__(cores, len(cores))
        self._host = host
        self._prefill, self._decode = profile.shared_host.prefill, profile.shared_host.decode

    def compute(self, batch: RunningBatch, work: int, end: Event) -> None:
        """Run a batch on these cores, and trigger the event `end` when the batch is complete.

        `work` is the duration of the batch in picoseconds without contention from other tasks.
        """
        self.contention = self._prefill if batch.prefills else self._decode
        self.phase = Phase.PREFILL if batch.prefills else Phase.DECODE
        self._host.begin(self, work, end)

    def drop(self) -> None:
        """Cancel the running batch; its end event does not happen."""
        self._host.drop(self)
