"""Recent history of a service in bounded memory.

No timer is needed: state changes only by reports, so the elapsed seconds are filled in before the next report or
snapshot.
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
INTERVAL_S = 1.0
WINDOW_S = 60.0
HELD = "held"
_MAX_REQUESTS = 200  # live requests in a snapshot


class InstanceHistory:
    """Current state and time series of one instance."""

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
        self._batches: deque[float] = deque(maxlen=length)
        self._waiting: deque[int] = deque(maxlen=length)
        self._kv_used: deque[float] = deque(maxlen=length)

    def step(self, sequences: int) -> None:
        self.batch = sequences
        self._iterations += 1
        self._sequences += sequences

    def sample(self) -> None:
        """Append the samples of one second."""
        status = self.status
        if self._iterations:
            self._batches.append(round(self._sequences / self._iterations, 2))
        else:  # an iteration may take longer than a second
            self._batches.append(self.batch if status.running else 0)
        self._iterations = self._sequences = 0
        self._waiting.append(status.waiting + status.lease_queue)
        used = 1 - status.blocks_free / status.blocks_total if status.blocks_total else 0.0
        self._kv_used.append(round(used, 4))

    def snapshot(self, name: str) -> InstanceSnapshot:
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
            series=InstanceSeries(batch=list(self._batches), waiting=list(self._waiting), kv_used=list(self._kv_used)),
        )


class History:
    """Time series of the last `seconds`, the last finished `requests` and the last `events`.

    The controller feeds it with times of the monotonic clock.
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
        self._sampled = 0  # seconds in the series
        self._instances: dict[str, InstanceHistory] = {}
        self._ended: deque[RequestSnapshot] = deque(maxlen=requests)
        self._events: deque[ServiceEvent] = deque(maxlen=events)
        self._latencies = LatencyWindow(self._slo, self._start_s)
        self.totals: Counter[str] = Counter()

    # -- instances ------------------------------------------------------------------------------------------------

    def role(self, instance: str, role: Role, now: float) -> None:
        """Record the current role of an instance; the first one is its home."""
        self._fill(now)
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
        """Record the state of an instance with a known role."""
        self._fill(now)
        known = self._instances.get(instance)
        if known is None or known.state is state:
            return
        if known.state is not InstanceState.STARTING or state is not InstanceState.UP:
            self.event(state.value, now, instance)
        known.state = state
        if state is InstanceState.LOST:
            known.status, known.batch = NO_STATUS, 0

    def status(self, instance: str, status: InstanceStatus, now: float) -> None:
        """Record the last reported status of an instance."""
        self._fill(now)
        known = self._instances.get(instance)
        if known is not None:
            known.status = status

    def step(self, instance: str, sequences: int, now: float) -> None:
        """Record an iteration that gave a token to this many sequences."""
        self._fill(now)
        known = self._instances.get(instance)
        if known is not None:
            known.step(sequences)

    def restarted(self, instance: str, now: float) -> None:
        """Record the restart of an instance."""
        self.totals["restarts"] += 1
        self.event("restarted", now, instance)
        known = self._instances.get(instance)
        if known is not None:
            known.restarts += 1
            known.state = InstanceState.STARTING

    def event(self, text: str, now: float, instance: str | None = None) -> None:
        """Record an event for operators."""
        self._events.append(ServiceEvent(at_s=now, instance=instance, text=text))

    # -- requests -------------------------------------------------------------------------------------------------

    def observe(self, timeline: Timeline, now: float | None = None) -> None:
        """Record the end of a request."""
        now = time.monotonic() if now is None else now
        reason = timeline.finish_reason
        self.totals[f"ended_{'none' if reason is None else reason.value}"] += 1
        self.totals["tokens"] += timeline.output_tokens
        self._latencies.end(timeline, now, good=self._slo.met_by(timeline))
        self._ended.append(_request(timeline, now))

    # -- snapshots ------------------------------------------------------------------------------------------------

    def snapshot(self, live: Collection[Timeline], now: float | None = None) -> ServiceSnapshot:
        """Return the current state and the history, with the `live` requests."""
        now = time.monotonic() if now is None else now
        self._fill(now)
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
        """Return finished requests and the oldest live ones, by arrival."""
        alive = sorted(live, key=lambda timeline: timeline.moments[Moment.ARRIVED])[:_MAX_REQUESTS]
        shown = [*self._ended, *map(_request, alive)]
        return tuple(sorted(shown, key=lambda request: request.stages[0].start_s))

    def _fill(self, now: float) -> None:
        """Sample the seconds that have passed with the state known in them."""
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
    """Count live requests by phase.

    A timeline counts a prompt as queued until the iteration that prefills it ends. If instances report fewer `waiting`
    prompts, the difference is counted as prefilling.
    """
    counts = dict.fromkeys([HELD, *(name.value for name in StageName)], 0)
    for timeline in live:
        held = Moment.ROUTED not in timeline.moments
        counts[HELD if held else stage_of(timeline).value] += 1
    begun = max(0, counts[StageName.QUEUE] - waiting)
    counts[StageName.QUEUE] -= begun
    counts[StageName.PREFILL] += begun
    return counts
