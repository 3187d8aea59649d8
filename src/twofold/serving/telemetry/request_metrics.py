"""Prometheus metrics of requests and instances."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from twofold.instance import Role
from twofold.kvcache.cache import RemovalReason
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.telemetry.snapshot import InstanceState
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline

PREFIX = "twofold:"


class MetricRegistry:
    """Creates metrics with the prefix `twofold:`; not global, so a process may run several services."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.collectors, buckets=buckets)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.collectors)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.collectors)


# fmt: off
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
SPAN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, *E2E_BUCKETS)  # milliseconds matter in queues and prefills
TRANSFER_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# fmt: on
TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))


# Metric, help, buckets and attribute of the timeline. The second table is for complete requests only.
_SPANS = (
    ("time_to_first_token", "From arrival to the first token.", TTFT_BUCKETS, "ttft_s"),
    ("request_queue_time", "From arrival to the start of prefill.", SPAN_BUCKETS, "queue_prefill_s"),
    ("request_prefill_time", "From the start of prefill to the first token.", SPAN_BUCKETS, "prefill_s"),
    ("request_decode_queue_time", "From KV transfer to the start of decode.", SPAN_BUCKETS, "queue_decode_s"),
    ("kv_transfer", "Duration of a KV hand-off.", TRANSFER_BUCKETS, "transfer_s"),
    ("kv_transfer_visible", "Part of a hand-off after first token.", TRANSFER_BUCKETS, "visible_transfer_s"),
)
_COMPLETE_SPANS = (
    ("e2e_request_latency", "From arrival to the last token.", E2E_BUCKETS, "e2e_s"),
    ("request_time_per_output_token", "Mean gap between a request's tokens.", ITL_BUCKETS, "tpot_s"),
)


class RequestMetrics:
    """Latencies, lengths and outcomes of finished requests."""

    def __init__(self, registry: MetricRegistry, slo: Slo) -> None:
        self._slo = slo
        histogram, counter = registry.histogram, registry.counter
        self._itl = histogram("inter_token_latency_seconds", "Gap between two tokens.", ITL_BUCKETS)
        self._spans = _histograms(registry, _SPANS)
        self._complete_spans = _histograms(registry, _COMPLETE_SPANS)
        self._decode = histogram("request_decode_time_seconds", "From the first to the last token.", SPAN_BUCKETS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._output = histogram("request_generation_tokens", "Output tokens of a request.", TOKEN_BUCKETS)
        self._finished = counter("request_success", "Finished requests by reason.", "finished_reason")
        self._good = counter("request_slo", "Finished requests by whether they met the SLO.", "met")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests with output.")
        self._output_tokens = counter("generation_tokens", "Output tokens.")

    def observe(self, timeline: Timeline) -> None:
        """Record a finished request."""
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
        spans = self._spans
        if timeline.complete:
            self._prompt.observe(timeline.request.prompt_tokens)
            self._output.observe(timeline.output_tokens)
            decode_s = timeline.span(Moment.FIRST_TOKEN, Moment.LAST_TOKEN)
            if decode_s is not None:
                self._decode.observe(decode_s)
            spans = {**spans, **self._complete_spans}
        for attribute, span in spans.items():
            seconds = getattr(timeline, attribute)
            if seconds is not None:
                span.observe(seconds)


def _histograms(
    registry: MetricRegistry, spans: tuple[tuple[str, str, tuple[float, ...], str], ...]
) -> dict[str, Histogram]:
    """Create the histograms of spans by timeline attribute."""
    return {attribute: registry.histogram(f"{name}_seconds", text, buckets) for name, text, buckets, attribute in spans}


BLOCK_STATES = ("total", "free", "in_flight", "cached", "pinned")
REQUEST_STATES = ("waiting", "running", "arriving", "handing_off", "lease_queue", "swapped")
SWAP_STATES = ("total", "free")
ENGINE_TIER = "engine"  # the memory of an instance's engine


class InstanceMetrics:
    """Load, cache, roles and states of instances."""

    def __init__(self, registry: MetricRegistry) -> None:
        gauge, counter = registry.gauge, registry.counter
        self._usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", "instance")
        self._blocks = gauge("kv_cache_blocks", "KV blocks by state.", "instance", "state")
        self._requests = gauge("num_requests", "Requests of an instance by state.", "instance", "state")
        self._running = gauge("num_requests_running", "Running requests of an instance.", "instance")
        self._waiting = gauge("num_requests_waiting", "Waiting prompts of an instance.", "instance")
        self._leases = gauge("kv_leases", "Leases on blocks for arriving KV.", "instance")
        self._swap = gauge("swap_blocks", "Swap blocks in host memory by state.", "instance", "state")
        self._swaps = counter("swaps", "Swap-outs of requests.", "instance")
        self._moved = counter("swap_blocks_moved", "KV blocks swapped out and in.", "instance")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "instance")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "instance", "tier")
        self._evictions = counter(
            "prefix_cache_evictions", "Evicted prefix blocks by reason.", "instance", "tier", "reason"
        )
        self._role = gauge("instance_role", "1 for the current role of an instance.", "instance", "role")
        self._state = gauge(
            "instance_state",
            "1 for the current state of an instance; open and half-open are states of its circuit breaker.",
            "instance",
            "state",
        )
        self._moves = counter("role_moves", "Changes of role.", "instance", "from_role", "to_role")
        self._restarts = counter("worker_restarts", "Restarts of worker processes.", "instance")
        self._roles: dict[str, Role] = {}
        self._statuses: dict[str, InstanceStatus] = {}

    def status(self, instance: str, status: InstanceStatus) -> None:
        """Record the last reported status of an instance."""
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
        """Record the prefix cache lookup of a prefilled prompt."""
        self._queries.labels(instance).inc(prompt_tokens)
        self._hits.labels(instance, ENGINE_TIER).inc(reused_tokens)

    def refresh(self) -> None:
        """Set the gauges from the last reports, which come after every iteration and are scraped rarely."""
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
        """Record the current role of an instance."""
        before = self._roles.get(instance)
        if before is not None and before is not role:
            self._moves.labels(instance, before.value, role.value).inc()
        self._roles[instance] = role
        for each in Role:
            self._role.labels(instance, each.value).set(each is role)

    def state(self, instance: str, state: InstanceState) -> None:
        """Record the current state of an instance."""
        for each in InstanceState:
            self._state.labels(instance, each.value).set(each is state)

    def restarted(self, instance: str) -> None:
        """Record the restart of an instance."""
        self._restarts.labels(instance).inc()

    def remove(self, instance: str) -> None:
        """Record the loss of an instance."""
        self._statuses.pop(instance, None)
        self.state(instance, InstanceState.LOST)
