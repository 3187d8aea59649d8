"""Where the metrics of one service are registered.

Metrics that ended requests make.

Metrics of instances: what they say of themselves, and what is said of them.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from twofold.instance import Role
from twofold.kvcache.cache import RemovalReason
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.telemetry.snapshot import InstanceState
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline

PREFIX = "twofold:"


class MetricRegistry:
    """Makes metrics with our prefix; nothing global, so several services can live in one process."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.collectors, buckets=buckets)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.collectors)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.collectors)


TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
# Where a request waits or prefills, some milliseconds are much.
SPAN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, *E2E_BUCKETS)
TRANSFER_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))


class RequestMetrics:
    """What ended requests say."""

    def __init__(self, registry: MetricRegistry, slo: Slo) -> None:
        self._slo = slo
        histogram, counter = registry.histogram, registry.counter
        self._ttft = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
        )
        self._itl = histogram("inter_token_latency_seconds", "Gap between two tokens.", ITL_BUCKETS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean gap of a request's tokens.", ITL_BUCKETS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", E2E_BUCKETS)
        self._queue = histogram(
            "request_queue_time_seconds", "From arrival to the start of prefill.", SPAN_BUCKETS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From the start of prefill to the first token.", SPAN_BUCKETS
        )
        self._decode_queue = histogram(
            "request_decode_queue_time_seconds", "From KV in place to the start of decode.", SPAN_BUCKETS
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token to the last one.", SPAN_BUCKETS
        )
        self._transfer = histogram("kv_transfer_seconds", "Duration of a KV hand-off.", TRANSFER_BUCKETS)
        self._visible = histogram(
            "kv_transfer_visible_seconds", "Part of a hand-off after the first token.", TRANSFER_BUCKETS
        )
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._output = histogram("request_generation_tokens", "Output tokens of a request.", TOKEN_BUCKETS)
        self._finished = counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self._good = counter("request_slo", "Requests that ended, by whether they met the SLO.", "met")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that made a token.")
        self._output_tokens = counter("generation_tokens", "Output tokens.")

    def observe(self, timeline: Timeline) -> None:
        """A request ended."""
        reason = timeline.finish_reason.value if timeline.finish_reason is not None else "none"
        self._finished.labels(reason).inc()
        self._output_tokens.inc(timeline.output_tokens)
        if timeline.output_tokens > 0:
            self._prompt_tokens.inc(timeline.request.prompt_tokens)
        for gap in timeline.itl_s:
            self._itl.observe(gap)
        if self._slo != Slo():
            met = self._slo.met_by(timeline)
            self._good.labels("true" if met else "false").inc()
        if timeline.complete:
            self._observe_complete(timeline)
        for histogram, seconds in (
            (self._ttft, timeline.ttft_s),
            (self._queue, timeline.queue_prefill_s),
            (self._prefill, timeline.prefill_s),
            (self._decode_queue, timeline.queue_decode_s),
            (self._transfer, timeline.transfer_s),
            (self._visible, timeline.visible_transfer_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def _observe_complete(self, timeline: Timeline) -> None:
        self._prompt.observe(timeline.request.prompt_tokens)
        self._output.observe(timeline.output_tokens)
        for histogram, seconds in (
            (self._e2e, timeline.e2e_s),
            (self._tpot, timeline.tpot_s),
            (self._decode, timeline.span(Moment.FIRST_TOKEN, Moment.LAST_TOKEN)),
        ):
            if seconds is not None:
                histogram.observe(seconds)


BLOCK_STATES = ("total", "free", "in_flight", "cached", "pinned")
REQUEST_STATES = ("waiting", "running", "arriving", "handing_off", "lease_queue", "swapped")
SWAP_STATES = ("total", "free")
ENGINE_TIER = "engine"  # the memory that an instance computes on


class InstanceMetrics:
    """What instances say of themselves, and what is said of them."""

    def __init__(self, registry: MetricRegistry) -> None:
        gauge, counter = registry.gauge, registry.counter
        self._usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", "instance")
        self._blocks = gauge("kv_cache_blocks", "KV blocks by state.", "instance", "state")
        self._requests = gauge("num_requests", "Requests on an instance by state.", "instance", "state")
        self._running = gauge("num_requests_running", "Requests that an instance has begun.", "instance")
        self._waiting = gauge("num_requests_waiting", "Prompts that wait on an instance.", "instance")
        self._leases = gauge("kv_leases", "Leases on blocks of an instance that KV comes to.", "instance")
        self._swap = gauge("swap_blocks", "Blocks of host memory to swap to, by state.", "instance", "state")
        self._swaps = counter("swaps", "Requests that were swapped out, each time.", "instance")
        self._moved = counter("swap_blocks_moved", "KV blocks that were swapped out and back.", "instance")
        self._queries = counter(
            "prefix_cache_queries",
            "Prompt tokens that were looked up in the KV cache of an instance.",
            "instance",
        )
        self._hits = counter(
            "prefix_cache_hits", "Prompt tokens of them that were there.", "instance", "tier"
        )
        self._evictions = counter(
            "prefix_cache_evictions",
            "KV blocks of prompts that were given up, by why.",
            "instance",
            "tier",
            "reason",
        )
        self._role = gauge("instance_role", "1 for the role that an instance plays now.", "instance", "role")
        self._state = gauge(
            "instance_state",
            "1 for the state of an instance; open and half-open are those of its circuit breaker.",
            "instance",
            "state",
        )
        self._moves = counter("role_moves", "Changes of role.", "instance", "from_role", "to_role")
        self._restarts = counter("worker_restarts", "Worker processes started again.", "instance")
        self._roles: dict[str, Role] = {}
        self._statuses: dict[str, InstanceStatus] = {}

    def status(self, instance: str, status: InstanceStatus) -> None:
        """The accounts of an instance as it last reported them."""
        before = self._statuses.get(instance)
        self._statuses[instance] = status
        if status.swap_blocks_total:
            was = (0, 0) if before is None else (before.swaps, before.swap_blocks_moved)
            self._swaps.labels(instance).inc(status.swaps - was[0])
            self._moved.labels(instance).inc(status.swap_blocks_moved - was[1])
        evicted = status.blocks_evicted - (0 if before is None else before.blocks_evicted)
        if evicted:
            self._evictions.labels(instance, ENGINE_TIER, RemovalReason.CAPACITY.value).inc(evicted)

    def prefilled(self, instance: str, prompt_tokens: int, reused_tokens: int) -> None:
        """A prompt whose beginning was looked up is computed; so many of its tokens were there."""
        self._queries.labels(instance).inc(prompt_tokens)
        self._hits.labels(instance, ENGINE_TIER).inc(reused_tokens)

    def refresh(self) -> None:
        """Put the last reports into the gauges: they come after every iteration, and are rarely looked at."""
        accounts = (self._usage, self._blocks, self._requests, self._running, self._waiting, self._leases)
        for gauge in (*accounts, self._swap):
            gauge.clear()
        for instance, status in self._statuses.items():
            self._usage.labels(instance).set(1 - status.blocks_free / status.blocks_total)
            for state in BLOCK_STATES:
                self._blocks.labels(instance, state).set(getattr(status, f"blocks_{state}"))
            for state in REQUEST_STATES:
                self._requests.labels(instance, state).set(getattr(status, state))
            for state in SWAP_STATES if status.swap_blocks_total else ():
                self._swap.labels(instance, state).set(getattr(status, f"swap_blocks_{state}"))
            self._running.labels(instance).set(status.running)
            self._waiting.labels(instance).set(status.waiting)
            self._leases.labels(instance).set(status.arriving)

    def role(self, instance: str, role: Role) -> None:
        """An instance plays this role from now on."""
        before = self._roles.get(instance)
        if before is not None and before is not role:
            self._moves.labels(instance, before.value, role.value).inc()
        self._roles[instance] = role
        for each in Role:
            self._role.labels(instance, each.value).set(each is role)

    def state(self, instance: str, state: InstanceState) -> None:
        """Whether an instance takes work."""
        for each in InstanceState:
            self._state.labels(instance, each.value).set(each is state)

    def restarted(self, instance: str) -> None:
        """A new process takes the place of an instance."""
        self._restarts.labels(instance).inc()

    def remove(self, instance: str) -> None:
        """An instance is gone; it is `lost` until it comes back."""
        self._statuses.pop(instance, None)
        self.state(instance, InstanceState.LOST)
