"""Stages of requests, and snapshots of the service for the dashboard."""

import time
from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum

import msgspec

from twofold.instance import Role
from twofold.request import FinishReason
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline


class StageName(StrEnum):
    """Stages of a request, in order. A layer-wise hand-off overlaps the prefill."""

    QUEUE = "queue"
    PREFILL = "prefill"
    HANDOFF = "hand-off"
    DECODE_QUEUE = "decode queue"
    DECODE = "decode"


class AttemptStage(StrEnum):
    """Stage of a request when its instance was lost. PROMPT covers the queue and the prefill."""

    PROMPT = "prompt"
    HANDOFF = "hand-off"
    DECODE = "decode"


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a request. Times are in monotonic seconds; `end_s` is None if the stage has not ended."""

    name: StageName
    start_s: float
    end_s: float | None


def stages_of(timeline: Timeline, ended_s: float | None = None) -> tuple[Stage, ...]:
    """Return the stages of a request that have begun. If a stage has no recorded end, it ends at `ended_s`. A hand-off
    begins no later than the first token. A running prefill counts as queued, because workers report it when it ends.
    """
    at = timeline.moments.get
    first, landed, decoding = at(Moment.FIRST_TOKEN), at(Moment.HANDOFF_ENDED), at(Moment.DECODE_STARTED)
    prefilling = at(Moment.PREFILL_STARTED)
    complete = timeline.complete
    sending, split = at(Moment.HANDOFF_STARTED), is_split(timeline)
    if first is not None and split and (decoding is not None or not complete):
        sending = first if sending is None else min(sending, first)
    ready = first
    if first is not None and split:
        ready = decoding if landed is None else max(first, landed)
    if complete and decoding is None:
        ready = None  # the first token was the last one
    spans = (
        (StageName.QUEUE, timeline.moments[Moment.ARRIVED], first if prefilling is None else prefilling),
        (StageName.PREFILL, prefilling, first),
        (StageName.HANDOFF, sending, decoding if landed is None else landed),
        (StageName.DECODE_QUEUE, ready, decoding),
        (StageName.DECODE, decoding, at(Moment.LAST_TOKEN) if complete else None),
    )
    return tuple(Stage(name, start, _end(start, end, ended_s)) for name, start, end in spans if start is not None)


def stage_of(timeline: Timeline) -> StageName:
    """Return the current stage of a live request. A running prefill counts as queued until its worker reports it."""
    moments = timeline.moments
    if Moment.DECODE_STARTED in moments:
        return StageName.DECODE
    if Moment.FIRST_TOKEN in moments:
        waits = is_split(timeline) and Moment.HANDOFF_ENDED not in moments
        return StageName.HANDOFF if waits else StageName.DECODE_QUEUE
    return StageName.PREFILL if Moment.PREFILL_STARTED in moments else StageName.QUEUE


def is_split(timeline: Timeline) -> bool:
    """Return whether a request is prefilled and decoded on different instances."""
    return timeline.prefill_instance != timeline.decode_instance


def _end(start: float, end: float | None, ended_s: float | None) -> float | None:
    """Return `end` (if None, `ended_s`), but at least `start`, because clocks of two processes may differ."""
    end = ended_s if end is None else end
    return None if end is None else max(start, end)


class InstanceState(StrEnum):
    """Availability of an instance. With circuit breaker OPEN it gets no requests, with HALF_OPEN one trial request."""

    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    OPEN = "open"
    HALF_OPEN = "half-open"
    LOST = "lost"


class PoolMember(msgspec.Struct, frozen=True, kw_only=True):
    """A worker with its role, health and load. `home` is the role set by the configuration or an operator. `state` is a
    WorkerState or `retired`. `circuit_breaker` is closed, open or half-open.
    """

    instance: str
    role: Role
    home: Role
    state: str
    circuit_breaker: str
    restarts: int
    waiting: int
    running: int
    blocks_total: int
    blocks_free: int


class InstanceSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Time series of an instance, one sample per second, oldest first. `batch` is the mean number of sequences that got
    a token in an iteration, `waiting` the number of waiting sequences, and `kv_used` the share of KV blocks in use.
    """

    batch: list[float]
    waiting: list[int]
    kv_used: list[float]


class RoleSpan(msgspec.Struct, frozen=True, array_like=True):
    """A role of an instance from `since_s` (monotonic seconds) until the start of its next RoleSpan."""

    role: Role
    since_s: float


class InstanceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State and history of one instance. `home` is its configured role. `lease_queue` counts requests that wait for KV
    blocks, `arriving` and `handing_off` requests with KV being received and sent. `batch` is the number of sequences
    that got a token in the last iteration.
    """

    instance: str
    role: Role
    home: Role
    state: InstanceState
    waiting: int = 0
    running: int = 0
    lease_queue: int = 0
    arriving: int = 0
    handing_off: int = 0
    batch: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_in_flight: int = 0
    restarts: int = 0
    roles: tuple[RoleSpan, ...] = ()
    series: InstanceSeries


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A live or recently finished request. `finish_reason` is None if it is live; `max_tokens` limits its output."""

    id: str
    prefill: str | None
    decode: str | None
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    finish_reason: FinishReason | None
    stages: tuple[Stage, ...]


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of `count` latencies. `within` is the share that meets the SLO's bound, None without a bound."""

    count: int = 0
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    within: float | None = None


class LatencySeries(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of a latency in each time bin, in seconds; None for an empty bin."""

    p50_s: list[float | None]
    p90_s: list[float | None]
    p99_s: list[float | None]


class ThroughputSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and latencies per bin of `bin_s` seconds. `good` counts the finished requests that met the SLO."""

    bin_s: float
    requests: list[int]
    good: list[int]
    tokens: list[int]
    ttft: LatencySeries
    itl: LatencySeries


class RecentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the last `window_s` seconds. `good` is the SLO attainment, None without requests or SLO bounds."""

    window_s: float
    requests: int
    tokens_per_s: float
    good: float | None
    ttft: LatencySummary
    itl: LatencySummary


class ServiceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event for the dashboard, such as a role change or a lost instance; `at_s` is in monotonic seconds."""

    at_s: float
    instance: str | None
    text: str


class ServiceLog:
    """Counters since the start of a service, and its latest 50 events."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.start_s = clock()
        self.totals: Counter[str] = Counter()
        self.events: deque[ServiceEvent] = deque(maxlen=50)

    def event(self, text: str, instance: str | None = None) -> None:
        """Record an event with the current time."""
        self.events.append(ServiceEvent(at_s=self.clock(), instance=instance, text=text))


class ServiceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State and recent history of a service. Times are in monotonic seconds; `now_s` is the same moment as Unix time
    `unix_s`. `phases` counts live requests by phase; `held` requests wait for placement. `totals` count from the start.
    """

    model: str
    version: str
    now_s: float
    unix_s: float
    started_s: float
    interval_s: float
    slo: Slo
    instances: tuple[InstanceSnapshot, ...]
    phases: dict[str, int]
    handoffs_in_flight: int
    requests: tuple[RequestSnapshot, ...]
    flow: ThroughputSeries
    recent: RecentSummary
    totals: dict[str, int]
    events: tuple[ServiceEvent, ...]
