"""The service at one moment and in its recent past, as plain values: what the dashboard is drawn from."""

from enum import StrEnum

import msgspec

from twofold.instance import Role
from twofold.request import FinishReason
from twofold.serving.stages import Stage
from twofold.slo import Slo


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


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What went through the service, per bin of `bin_s` seconds; the last bin is not over yet.

    `requests` ended, `good` ones of them within the SLO; `tokens` were put out.
    """

    bin_s: float
    requests: list[int]
    good: list[int]
    tokens: list[int]
    ttft: LatencySeries
    itl: LatencySeries


class Recent(msgspec.Struct, frozen=True, kw_only=True):
    """The last `window_s` seconds together; `good` is the share of ended requests that met the SLO."""

    window_s: float
    requests: int
    tokens_per_s: float
    good: float | None
    ttft: LatencySummary
    itl: LatencySummary


class Event(msgspec.Struct, frozen=True, kw_only=True):
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
    flow: Flow
    recent: Recent
    totals: dict[str, int]
    events: tuple[Event, ...]
