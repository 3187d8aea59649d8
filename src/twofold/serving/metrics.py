"""Prometheus metrics of the service. Names follow vLLM's where they mean the same, with our prefix."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from twofold.request import FinishReason
from twofold.scheduling.instance import InstanceStatus
from twofold.serving.messages import HandoffReport
from twofold.timeline import Timeline

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
TRANSFER_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
BLOCK_STATES = ("total", "free", "in_flight")
REQUEST_STATES = ("waiting", "running", "arriving", "handing_off", "lease_queue")


class ServiceMetrics:
    """One registry per service; nothing global, so several can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"twofold:{name}", text, registry=self._registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"twofold:{name}", text, labels, registry=self._registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"twofold:{name}", text, labels, registry=self._registry)

        self._ttft = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
        )
        self._itl = histogram("inter_token_latency_seconds", "Gap between two tokens.", ITL_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", E2E_BUCKETS)
        self._queue = histogram(
            "request_queue_time_seconds", "From arrival to the start of prefill.", E2E_BUCKETS
        )
        self._transfer = histogram("kv_transfer_seconds", "Duration of a KV hand-off.", TRANSFER_BUCKETS)
        self._visible = histogram(
            "kv_transfer_visible_seconds", "Part of a hand-off after the first token.", TRANSFER_BUCKETS
        )
        self._transferred = counter("kv_transfer_bytes", "Bytes of KV cache handed off.")
        self._finished = counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that made a token.")
        self._output_tokens = counter("generation_tokens", "Output tokens.")
        self._usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", "instance")
        self._blocks = gauge("kv_cache_blocks", "KV blocks by state.", "instance", "state")
        self._requests = gauge("num_requests", "Requests on an instance by state.", "instance", "state")

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def status(self, instance: str, status: InstanceStatus) -> None:
        """The accounts of an instance as it last reported them."""
        self._usage.labels(instance).set(1 - status.blocks_free / status.blocks_total)
        for state in BLOCK_STATES:
            self._blocks.labels(instance, state).set(getattr(status, f"blocks_{state}"))
        for state in REQUEST_STATES:
            self._requests.labels(instance, state).set(getattr(status, state))

    def remove(self, instance: str) -> None:
        """An instance is gone."""
        self._usage.remove(instance)
        for state in BLOCK_STATES:
            self._blocks.remove(instance, state)
        for state in REQUEST_STATES:
            self._requests.remove(instance, state)

    def handoff(self, report: HandoffReport) -> None:
        self._transferred.inc(report.bytes_moved)

    def observe(self, timeline: Timeline) -> None:
        """A request ended: a sink of the recorder."""
        reason = timeline.finish_reason.value if timeline.finish_reason is not None else "none"
        self._finished.labels(reason).inc()
        self._output_tokens.inc(timeline.output_tokens)
        if timeline.output_tokens > 0:
            self._prompt_tokens.inc(timeline.request.prompt_tokens)
        for gap in timeline.itl_s:
            self._itl.observe(gap)
        complete = timeline.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}
        for histogram, seconds in (
            (self._ttft, timeline.ttft_s),
            (self._e2e, timeline.e2e_s if complete else None),
            (self._queue, timeline.queue_prefill_s),
            (self._transfer, timeline.transfer_s),
            (self._visible, timeline.visible_transfer_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)
