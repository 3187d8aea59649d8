"""Telemetry of finished requests: Prometheus metrics, and recent requests and latencies for the dashboard."""

from collections import deque
from collections.abc import Collection, Iterable

from prometheus_client import Histogram

from twofold.serving.telemetry.latencies import LatencyWindow
from twofold.serving.telemetry.metrics import GapHistogram, MetricRegistry
from twofold.serving.telemetry.snapshot import RequestSnapshot, ServiceLog, StageName, stage_of, stages_of
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline

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
HELD = "held"
_MAX_REQUESTS = 200  # live requests, and finished ones, in a snapshot


class RequestTelemetry:
    """Metrics and recent history of finished requests: latencies, lengths and outcomes."""

    def __init__(self, registry: MetricRegistry, log: ServiceLog, slo: Slo) -> None:
        histogram, counter = registry.histogram, registry.counter
        self._itl = GapHistogram("inter_token_latency_seconds", "Gap between two tokens.", ITL_BUCKETS)
        registry.collectors.register(self._itl)
        self._spans = _histograms(registry, _SPANS)
        self._complete_spans = _histograms(registry, _COMPLETE_SPANS)
        self._decode = histogram("request_decode_time_seconds", "From the first to the last token.", SPAN_BUCKETS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._output = histogram("request_generation_tokens", "Output tokens of a request.", TOKEN_BUCKETS)
        self._finished = counter("request_success", "Finished requests by reason.", "finished_reason")
        self._good = counter("request_slo", "Finished requests by whether they met the SLO.", "met")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests with output.")
        self._output_tokens = counter("generation_tokens", "Output tokens.")
        self._log, self._slo = log, slo
        self._ended: deque[RequestSnapshot] = deque(maxlen=_MAX_REQUESTS)
        self.latencies = LatencyWindow(slo, log.start_s)

    def ended(self, timeline: Timeline, now: float) -> None:
        good = self._slo.met_by(timeline)
        self._observe(timeline, good=good)
        self.latencies.end(timeline, now, good=good)
        self._ended.append(_snapshot(timeline, now))

    def _observe(self, timeline: Timeline, *, good: bool) -> None:
        reason = timeline.finish_reason.value if timeline.finish_reason is not None else "none"
        self._finished.labels(reason).inc()
        self._output_tokens.inc(timeline.output_tokens)
        self._log.totals[f"ended_{reason}"] += 1
        self._log.totals["tokens"] += timeline.output_tokens
        if timeline.output_tokens > 0:
            self._prompt_tokens.inc(timeline.request.prompt_tokens)
        self._itl.observe(timeline.itl_s)
        if self._slo != Slo():
            self._good.labels("true" if good else "false").inc()
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

    def snapshot(self, live: Iterable[Timeline]) -> tuple[RequestSnapshot, ...]:
        """Return recent finished requests and the oldest requests in `live`, ordered by arrival."""
        alive = sorted(live, key=lambda timeline: timeline.moments[Moment.ARRIVED])[:_MAX_REQUESTS]
        shown = [*self._ended, *map(_snapshot, alive)]
        return tuple(sorted(shown, key=lambda request: request.stages[0].start_s))


def _histograms(
    registry: MetricRegistry, spans: tuple[tuple[str, str, tuple[float, ...], str], ...]
) -> dict[str, Histogram]:
    return {attribute: registry.histogram(f"{name}_seconds", text, buckets) for name, text, buckets, attribute in spans}


def _snapshot(timeline: Timeline, ended_s: float | None = None) -> RequestSnapshot:
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


def phases(live: Collection[Timeline], waiting: int) -> dict[str, int]:
    """Count live requests by phase. The argument `waiting` is the number of prompts that instances report as queued."""
    counts = dict.fromkeys([HELD, *(name.value for name in StageName)], 0)
    for timeline in live:
        held = Moment.ROUTED not in timeline.moments
        counts[HELD if held else stage_of(timeline).value] += 1
    # A timeline records the start of a prefill only when the prefill ends, so other queued prompts are prefilling.
    begun = max(0, counts[StageName.QUEUE] - waiting)
    counts[StageName.QUEUE] -= begun
    counts[StageName.PREFILL] += begun
    return counts
