"""Stages of requests, and snapshots of the service for the dashboard."""

import time
from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum

import msgspec

from twofold.instance import Role
from twofold.request import FinishReason, RequestTimings
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.telemetry.host import DeviceLoad, LoadSample
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline


class StageName(StrEnum):
    """Stages of a request, from queueing to decode."""

    QUEUE = "queue"
    PREFILL = "prefill"
    HANDOFF = "hand-off"
    DECODE_QUEUE = "decode queue"
    DECODE = "decode"


class AttemptStage(StrEnum):
    """Stage of a request when its instance was lost. PROMPT covers queueing and prefill."""

    PROMPT = "prompt"
    HANDOFF = "hand-off"
    DECODE = "decode"


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a request. Times are in monotonic seconds; `end_s` is None if the stage has not ended."""

    name: StageName
    start_s: float
    end_s: float | None


def stages_of(timeline: Timeline, ended_s: float | None = None) -> tuple[Stage, ...]:
    """Return the stages that a request has begun, with start and end in monotonic seconds, or `ended_s` if unknown."""
    # A running prefill counts as queued, because workers report it when it ends.
    at = timeline.moments.get
    first, landed, decoding = at(Moment.FIRST_TOKEN), at(Moment.HANDOFF_ENDED), at(Moment.DECODE_STARTED)
    prefilling = at(Moment.PREFILL_STARTED)
    complete = timeline.complete
    sending, split = at(Moment.HANDOFF_STARTED), is_split(timeline)
    if first is not None and split and (decoding is not None or not complete):
        sending = first if sending is None else min(sending, first)  # a hand-off begins no later than the first token
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
    """Return the current stage of a live request, such as queue, prefill or decode.

    A request stays in the queue stage until a worker reports that the prefill has started.
    """
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
    end = ended_s if end is None else end
    return None if end is None else max(start, end)  # clocks of two processes may differ


class InstanceState(StrEnum):
    """Availability of an instance. OPEN and HALF_OPEN are states of its circuit breaker."""

    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    OPEN = "open"
    HALF_OPEN = "half-open"
    LOST = "lost"


class PoolMember(msgspec.Struct, frozen=True, kw_only=True):
    """Role, health and load of one worker."""

    instance: str
    role: Role
    home: Role
    state: str  # a WorkerState, or retired
    circuit_breaker: str  # closed, open or half-open
    restarts: int
    waiting: int
    running: int
    blocks_total: int
    blocks_free: int


class InstanceSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Time series of an instance, one sample per second, oldest first."""

    batch: list[float]  # mean number of sequences that got a token in an iteration
    waiting: list[int]  # sequences
    kv_used: list[float]  # share of KV blocks in use


class RoleSpan(msgspec.Struct, frozen=True, array_like=True):
    """Role of an instance, and the time at which the instance took the role, in monotonic seconds."""

    role: Role
    since_s: float


class InstanceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State and history of one instance."""

    instance: str
    role: Role
    home: Role  # the configured role
    state: InstanceState
    status: InstanceStatus
    batch: int = 0  # sequences that got a token in the last iteration
    restarts: int = 0
    roles: tuple[RoleSpan, ...] = ()
    series: InstanceSeries


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A live or recently finished request. `finish_reason` is None if it is live."""

    id: str
    prefill: str | None
    decode: str | None
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    finish_reason: FinishReason | None
    stages: tuple[Stage, ...]
    timings: RequestTimings


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of latencies in seconds, and the share of latencies within the SLO bound."""

    count: int = 0  # latencies
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    within: float | None = None  # None without a bound


class LatencySeries(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of a latency in each time bin, in seconds; None for an empty bin."""

    p50_s: list[float | None]
    p90_s: list[float | None]
    p99_s: list[float | None]


class ThroughputSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Finished requests, tokens and latencies in each time bin of `bin_s` seconds."""

    bin_s: float
    requests: list[int]
    good: list[int]  # requests that met the SLO
    tokens: list[int]
    ttft: LatencySeries
    itl: LatencySeries


class RecentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput, latencies and SLO attainment of the last `window_s` seconds."""

    window_s: float
    requests: int
    tokens_per_s: float
    good: float | None  # SLO attainment; None without requests or bounds
    ttft: LatencySummary
    itl: LatencySummary


class ServiceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event for the dashboard, such as a role change or a lost instance; `at_s` is in monotonic seconds."""

    at_s: float
    instance: str | None
    text: str


class ServiceHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Series of the last hours: of requests, from bin `first` on, and samples of the pools in these bins."""

    first: int
    flow: ThroughputSeries
    samples: tuple[LoadSample, ...]


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
    """State and recent history of a service. Times are in monotonic seconds."""

    model: str
    version: str
    now_s: float
    unix_s: float  # `now_s` as Unix time
    started_s: float
    interval_s: float
    slo: Slo
    instances: tuple[InstanceSnapshot, ...]
    phases: dict[str, int]  # live requests; `held` ones wait for placement
    handoffs_in_flight: int
    requests: tuple[RequestSnapshot, ...]
    flow: ThroughputSeries
    recent: RecentSummary
    totals: dict[str, int]  # since the start
    events: tuple[ServiceEvent, ...]
    configuration: dict[str, str]
    host: tuple[DeviceLoad, ...]  # the CPU, then the GPUs
