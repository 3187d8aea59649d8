"""Stages of requests, and snapshots of the service for the dashboard.

    queue ─ prefill ─ hand-off ─ decode queue ─ decode        (see the drawing in `twofold.timeline`)

A layer-wise hand-off overlaps the prefill. If a hand-off waits for free blocks, the hand-off stage starts at the first
token: from then on, only this wait delays the request.
"""

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
    """Stages of a request, in chronological order."""

    QUEUE = "queue"
    PREFILL = "prefill"
    HANDOFF = "hand-off"
    DECODE_QUEUE = "decode queue"
    DECODE = "decode"


class AttemptStage(StrEnum):
    """Stage in which an attempt was lost. PROMPT covers the queue and the prefill."""

    PROMPT = "prompt"
    HANDOFF = "hand-off"
    DECODE = "decode"


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a request. Times are in monotonic seconds; `end_s` is None if the stage has not ended."""

    name: StageName
    start_s: float
    end_s: float | None


def stages_of(timeline: Timeline, ended_s: float | None = None) -> tuple[Stage, ...]:
    """Return the stages of a request that have begun. If the request has ended, stages without an end get `ended_s`.

    Workers report the events of an iteration when it ends. Until then, a running prefill counts as queued, and a
    running KV transfer counts from the first token.
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
    """Return the current stage of a live request according to its timeline (see `stages_of`)."""
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
    """Return the end of a stage, but at least its start, because clocks of two processes may differ slightly."""
    end = ended_s if end is None else end
    return None if end is None else max(start, end)


class InstanceState(StrEnum):
    """Availability of an instance. It receives no request in the state OPEN, and one trial request in HALF_OPEN."""

    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    OPEN = "open"
    HALF_OPEN = "half-open"
    LOST = "lost"


class PoolMember(msgspec.Struct, frozen=True, kw_only=True):
    """A worker with its roles, health and load.

    `home` is the configured role, or the role set by an operator. `state` is a WorkerState or `retired`,
    `circuit_breaker` is closed, open or half-open. `blocks_total` and `blocks_free` count KV blocks.
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
    """Time series of an instance, with one sample per second, oldest first.

    Instances that started later have fewer samples. `batch` is the mean number of sequences that got a token per
    iteration, `waiting` is the number of waiting sequences, and `kv_used` is the share of KV blocks in use.
    """

    batch: list[float]
    waiting: list[int]
    kv_used: list[float]


class RoleSpan(msgspec.Struct, frozen=True, array_like=True):
    """Role of an instance from `since_s` until the start of its next RoleSpan."""

    role: Role
    since_s: float


class InstanceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State and history of one instance.

    `role` is the current role, `home` the configured one. The load consists of `waiting` prompts, `running` sequences,
    `lease_queue` requests that wait for blocks, and `arriving` and `handing_off` requests with KV in transfer. `batch`
    is the number of sequences that got a token in the last iteration.
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
    """A live or recently finished request. A live one has no `finish_reason`. `max_tokens` limits the output."""

    id: str
    prefill: str | None
    decode: str | None
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    finish_reason: FinishReason | None
    stages: tuple[Stage, ...]


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of `count` latencies. `within` is the share that meets the SLO's bound, or None without a bound."""

    count: int = 0
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    within: float | None = None


class LatencySeries(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of a latency, with one value for each time bin; None for an empty bin."""

    p50_s: list[float | None]
    p90_s: list[float | None]
    p99_s: list[float | None]


class ThroughputSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput and latencies in each time bin of `bin_s` seconds. The last bin is incomplete.

    `requests` counts finished requests, `good` the finished requests that met the SLO, and `tokens` output tokens.
    """

    bin_s: float
    requests: list[int]
    good: list[int]
    tokens: list[int]
    ttft: LatencySeries
    itl: LatencySeries


class RecentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the last `window_s` seconds. `good` is the share of requests that met the SLO, None if undefined."""

    window_s: float
    requests: int
    tokens_per_s: float
    good: float | None
    ttft: LatencySummary
    itl: LatencySummary


class ServiceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event in the service that operators see on the dashboard; `at_s` is in monotonic seconds."""

    at_s: float
    instance: str | None
    text: str


class ServiceLog:
    """Totals since the start of a service, and its latest events for operators."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.start_s = clock()
        self.totals: Counter[str] = Counter()
        self.events: deque[ServiceEvent] = deque(maxlen=50)

    def event(self, text: str, instance: str | None = None) -> None:
        """Record an event with the current time."""
        self.events.append(ServiceEvent(at_s=self.clock(), instance=instance, text=text))


class ServiceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State and recent history of a service. Times are in monotonic seconds; `now_s` corresponds to Unix time `unix_s`.

    `phases` counts live requests by phase; `held` requests are not placed yet. `totals` count from the service's start.
    `requests` are ordered by arrival.
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
