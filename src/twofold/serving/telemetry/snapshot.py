"""The stages of a request, from its timeline: what spans, logs and the dashboard show, cut in one place.

    queue ─ prefill ─ hand-off ─ decode queue ─ decode        (see the drawing in `twofold.timeline`)

A hand-off layer by layer begins while the prefill runs, so these two may overlap; one that has to wait for room
begins with the first token, when there is nothing else left to wait for.

The service at one moment and in its recent past, as plain values: what the dashboard is drawn from.
"""

from enum import StrEnum

import msgspec

from twofold.instance import Role
from twofold.request import FinishReason
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline


class StageName(StrEnum):
    """In the order in which a request goes through them."""

    QUEUE = "queue"
    PREFILL = "prefill"
    HANDOFF = "hand-off"
    DECODE_QUEUE = "decode queue"
    DECODE = "decode"


class AttemptStage(StrEnum):
    """The stage at which an attempt was lost. PROMPT covers the queue and the prefill."""

    PROMPT = "prompt"
    HANDOFF = "hand-off"
    DECODE = "decode"


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One stage of one request, in monotonic seconds; `end_s` None means that it goes on."""

    name: StageName
    start_s: float
    end_s: float | None


def stages_of(timeline: Timeline, ended_s: float | None = None) -> tuple[Stage, ...]:
    """The stages that have begun; those that go on are cut at `ended_s`, where the request ended then.

    What happens inside an iteration is known when it is over: until then a prompt that is being prefilled
    counts as queued, and KV that travels counts as travelling from the first token on.
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
        ready = None  # its first token was its last: nothing was to be decoded
    spans = (
        (StageName.QUEUE, timeline.moments[Moment.ARRIVED], first if prefilling is None else prefilling),
        (StageName.PREFILL, prefilling, first),
        (StageName.HANDOFF, sending, decoding if landed is None else landed),
        (StageName.DECODE_QUEUE, ready, decoding),
        (StageName.DECODE, decoding, at(Moment.LAST_TOKEN) if complete else None),
    )
    return tuple(
        Stage(name, start, _end(start, end, ended_s)) for name, start, end in spans if start is not None
    )


def stage_of(timeline: Timeline) -> StageName:
    """The stage that a request is in, as far as it is known (see `stages_of`)."""
    moments = timeline.moments
    if Moment.DECODE_STARTED in moments:
        return StageName.DECODE
    if Moment.FIRST_TOKEN in moments:
        waits = is_split(timeline) and Moment.HANDOFF_ENDED not in moments
        return StageName.HANDOFF if waits else StageName.DECODE_QUEUE
    return StageName.PREFILL if Moment.PREFILL_STARTED in moments else StageName.QUEUE


def is_split(timeline: Timeline) -> bool:
    """Whether the request is decoded elsewhere than it was prefilled."""
    return timeline.prefill_instance != timeline.decode_instance


def _end(start: float, end: float | None, ended_s: float | None) -> float | None:
    """Clocks of two processes may disagree by a little; a stage lasts no less than nothing."""
    end = ended_s if end is None else end
    return None if end is None else max(start, end)


class InstanceState(StrEnum):
    """Whether an instance takes work. OPEN and HALF_OPEN are its circuit breaker's: none, or one request on trial."""

    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    OPEN = "open"
    HALF_OPEN = "half-open"
    LOST = "lost"


class InstanceSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One number a second, the last of them the latest; an instance that came later has fewer.

    `batch` is the mean number of sequences that an iteration gave a token to, `waiting` the sequences that wait
    there for anything, `kv_used` a share of the KV blocks.
    """

    batch: list[float]
    waiting: list[int]
    kv_used: list[float]


class RoleSpan(msgspec.Struct, frozen=True, array_like=True):
    """An instance is in the pool of `role` from `since_s` on."""

    role: Role
    since_s: float


class InstanceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One instance: `role` is the pool it is in now, `home` the one it was started for.

    `waiting` prompts are not begun, `lease_queue` requests wait for blocks here, KV of `arriving` ones is on its
    way here and of `handing_off` ones on its way out or held for it. `batch` counts the sequences that the last
    iteration gave a token to.
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
    """One request, alive (no `finish_reason`) or ended lately; `max_tokens` is the most it may put out."""

    id: str
    prefill: str | None
    decode: str | None
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    finish_reason: FinishReason | None
    stages: tuple[Stage, ...]


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles in seconds of `count` latencies, and the share of them within the SLO where it bounds them."""

    count: int = 0
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    within: float | None = None


class LatencySeries(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of one latency, in seconds, per bin; None where nothing was measured."""

    p50_s: list[float | None]
    p90_s: list[float | None]
    p99_s: list[float | None]


class ThroughputSeries(msgspec.Struct, frozen=True, kw_only=True):
    """What went through the service, per bin of `bin_s` seconds; the last bin is not over yet.

    `requests` ended, `good` ones of them within the SLO; `tokens` were put out.
    """

    bin_s: float
    requests: list[int]
    good: list[int]
    tokens: list[int]
    ttft: LatencySeries
    itl: LatencySeries


class RecentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The last `window_s` seconds together; `good` is the share of ended requests that met the SLO."""

    window_s: float
    requests: int
    tokens_per_s: float
    good: float | None
    ttft: LatencySummary
    itl: LatencySummary


class ServiceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an operator may want to know, at monotonic `at_s`."""

    at_s: float
    instance: str | None
    text: str


class ServiceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. Times are monotonic seconds, and `now_s` is `unix_s` on the other clock.

    `phases` counts the requests that are alive by phase, `held` among them: those that no instance can take now.
    `totals` are since the start. `requests` are ordered by arrival.
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
