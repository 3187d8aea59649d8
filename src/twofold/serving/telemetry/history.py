"""The recent past of one instance.

The recent past of a service, in bounded memory.

It needs no timer: what is known of an instance changes only when somebody says so, so the seconds that have passed
are filled in before the next change, or when somebody looks.
"""

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable
from typing import Final

import twofold
from twofold.instance import Role
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.telemetry.latencies import LatencyWindow
from twofold.serving.telemetry.snapshot import (
    InstanceSeries,
    InstanceSnapshot,
    InstanceState,
    RequestSnapshot,
    RoleSpan,
    ServiceEvent,
    ServiceSnapshot,
    StageName,
    stage_of,
    stages_of,
)
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline

NO_STATUS: Final = InstanceStatus(0, 0, 0, 0, 0, 0, 0, 0)


class InstanceHistory:
    """What is known of one instance now, and its series."""

    def __init__(self, role: Role, length: int) -> None:
        self.home = role
        self.role = role
        self.state = InstanceState.STARTING
        self.status = NO_STATUS
        self.batch = 0
        self.restarts = 0
        self.roles: deque[RoleSpan] = deque(maxlen=64)
        self._iterations = 0
        self._sequences = 0
        self._series: tuple[deque[float], deque[int], deque[float]] = (
            deque(maxlen=length),
            deque(maxlen=length),
            deque(maxlen=length),
        )

    def step(self, sequences: int) -> None:
        self.batch = sequences
        self._iterations += 1
        self._sequences += sequences

    def sample(self) -> None:
        """One second is over."""
        batch, waiting, kv_used = self._series
        status = self.status
        if self._iterations:
            batch.append(round(self._sequences / self._iterations, 2))
        else:  # an iteration may take longer than a second
            batch.append(self.batch if status.running else 0)
        self._iterations = self._sequences = 0
        waiting.append(status.waiting + status.lease_queue)
        kv_used.append(round(1 - status.blocks_free / status.blocks_total, 4) if status.blocks_total else 0.0)

    def snapshot(self, name: str) -> InstanceSnapshot:
        batch, waiting, kv_used = self._series
        status = self.status
        return InstanceSnapshot(
            instance=name,
            role=self.role,
            home=self.home,
            state=self.state,
            waiting=status.waiting,
            running=status.running,
            lease_queue=status.lease_queue,
            arriving=status.arriving,
            handing_off=status.handing_off,
            batch=self.batch if status.running else 0,
            blocks_total=status.blocks_total,
            blocks_free=status.blocks_free,
            blocks_in_flight=status.blocks_in_flight,
            restarts=self.restarts,
            roles=tuple(self.roles),
            series=InstanceSeries(batch=list(batch), waiting=list(waiting), kv_used=list(kv_used)),
        )


INTERVAL_S = 1.0
WINDOW_S = 60.0
HELD = "held"
# The dashboard cannot show more, and with thousands alive nobody could read it.
_MOST_REQUESTS = 200


class History:
    """Fed by the controller, with times on the monotonic clock; `observe` is a sink of its recorder.

    It keeps `seconds` of series, the last `requests` ended requests and the last `events`.
    """

    def __init__(
        self,
        model: str,
        slo: Slo | None = None,
        *,
        start_s: float | None = None,
        seconds: int = 300,
        requests: int = 200,
        events: int = 50,
    ) -> None:
        self._model = model
        self._slo = slo or Slo()
        self._start_s = time.monotonic() if start_s is None else start_s
        self._seconds = seconds
        self._sampled = 0  # seconds that are in the series
        self._instances: dict[str, InstanceHistory] = {}
        self._ended: deque[RequestSnapshot] = deque(maxlen=requests)
        self._events: deque[ServiceEvent] = deque(maxlen=events)
        self._latencies = LatencyWindow(self._slo, self._start_s)
        self.totals: Counter[str] = Counter()

    # -- instances ------------------------------------------------------------------------------------------------

    def role(self, instance: str, role: Role, now: float) -> None:
        """An instance is in the pool of `role` from now on; the first role told is its home."""
        self._pass_time(now)
        known = self._instances.get(instance)
        if known is None:
            known = self._instances[instance] = InstanceHistory(role, self._seconds)
        elif known.role is role:
            return
        else:
            self.event(f"{known.role.value} → {role.value}", now, instance)
        known.role = role
        known.roles.append(RoleSpan(role, now))

    def state(self, instance: str, state: InstanceState, now: float) -> None:
        """Whether an instance, whose role was told before, takes work."""
        self._pass_time(now)
        known = self._instances.get(instance)
        if known is None or known.state is state:
            return
        if known.state is not InstanceState.STARTING or state is not InstanceState.UP:
            self.event(state.value, now, instance)
        known.state = state
        if state is InstanceState.LOST:
            known.status, known.batch = NO_STATUS, 0

    def status(self, instance: str, status: InstanceStatus, now: float) -> None:
        """The accounts of an instance as it last reported them."""
        self._pass_time(now)
        known = self._instances.get(instance)
        if known is not None:
            known.status = status

    def step(self, instance: str, sequences: int, now: float) -> None:
        """An iteration of an instance gave a token to so many sequences."""
        self._pass_time(now)
        known = self._instances.get(instance)
        if known is not None:
            known.step(sequences)

    def restarted(self, instance: str, now: float) -> None:
        """A new process takes the place of an instance."""
        self.totals["restarts"] += 1
        self.event("restarted", now, instance)
        known = self._instances.get(instance)
        if known is not None:
            known.restarts += 1
            known.state = InstanceState.STARTING

    def event(self, text: str, now: float, instance: str | None = None) -> None:
        """Something that an operator may want to know."""
        self._events.append(ServiceEvent(at_s=now, instance=instance, text=text))

    # -- requests -------------------------------------------------------------------------------------------------

    def observe(self, timeline: Timeline, now: float | None = None) -> None:
        """A request ended."""
        now = time.monotonic() if now is None else now
        reason = timeline.finish_reason
        self.totals[f"ended_{'none' if reason is None else reason.value}"] += 1
        self.totals["tokens"] += timeline.output_tokens
        self._latencies.end(timeline, now, good=self._slo.met_by(timeline))
        self._ended.append(_request(timeline, now))

    # -- looking --------------------------------------------------------------------------------------------------

    def snapshot(self, live: Collection[Timeline], now: float | None = None) -> ServiceSnapshot:
        """Everything, with the requests that are alive."""
        now = time.monotonic() if now is None else now
        self._pass_time(now)
        for timeline in live:
            self._latencies.take(timeline)
        instances = tuple(known.snapshot(name) for name, known in sorted(self._instances.items()))
        return ServiceSnapshot(
            model=self._model,
            version=twofold.__version__,
            now_s=now,
            unix_s=time.time(),
            started_s=self._start_s,
            interval_s=INTERVAL_S,
            slo=self._slo,
            instances=instances,
            phases=_phases(live, sum(each.waiting for each in instances)),
            handoffs_in_flight=sum(each.arriving for each in instances),
            requests=self._requests(live),
            flow=self._latencies.flow(now),
            recent=self._latencies.recent(now, WINDOW_S),
            totals=dict(self.totals),
            events=tuple(self._events),
        )

    def _requests(self, live: Iterable[Timeline]) -> tuple[RequestSnapshot, ...]:
        """The oldest of those alive are shown first of all: they are the ones that wait."""
        alive = sorted(live, key=lambda timeline: timeline.moments[Moment.ARRIVED])[:_MOST_REQUESTS]
        shown = [*self._ended, *map(_request, alive)]
        return tuple(sorted(shown, key=lambda request: request.stages[0].start_s))

    def _pass_time(self, now: float) -> None:
        """Fill in the seconds that have passed, with what was known in them."""
        passed = int((now - self._start_s) / INTERVAL_S) - self._sampled
        if passed <= 0:
            return
        self._sampled += passed
        for _ in range(min(passed, self._seconds)):
            for known in self._instances.values():
                known.sample()


def _request(timeline: Timeline, ended_s: float | None = None) -> RequestSnapshot:
    return RequestSnapshot(
        id=timeline.request.id,
        prefill=timeline.prefill_instance,
        decode=timeline.decode_instance,
        prompt_tokens=timeline.request.prompt_tokens,
        output_tokens=timeline.output_tokens,
        max_tokens=timeline.request.output_tokens,
        finish_reason=timeline.finish_reason,
        stages=stages_of(timeline, ended_s),
    )


def _phases(live: Iterable[Timeline], waiting: int) -> dict[str, int]:
    """Requests that are alive by phase.

    A prompt counts as queued in its timeline until the iteration that prefills it is over; the instances say how
    many of these really wait.
    """
    counts = dict.fromkeys([HELD, *(name.value for name in StageName)], 0)
    for timeline in live:
        held = Moment.ROUTED not in timeline.moments
        counts[HELD if held else stage_of(timeline).value] += 1
    begun = max(0, counts[StageName.QUEUE] - waiting)
    counts[StageName.QUEUE] -= begun
    counts[StageName.PREFILL] += begun
    return counts
