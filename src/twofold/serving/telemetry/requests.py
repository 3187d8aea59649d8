"""Telemetry of finished requests: Prometheus metrics, and recent requests and latencies for the dashboard."""

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import starmap
from operator import attrgetter

from twofold.serving.telemetry.latencies import LatencyWindow
from twofold.serving.telemetry.metrics import BulkHistogram, MetricRegistry
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
    ("kv_transfer", "Duration of a KV hand-off.", TRANSFER_BUCKETS, "transfer_s"),
)
_COMPLETE_SPANS = (
    ("e2e_request_latency", "From arrival to the last token.", E2E_BUCKETS, "e2e_s"),
    ("request_time_per_output_token", "Mean gap between a request's tokens.", ITL_BUCKETS, "tpot_s"),
)
# The parts of the TTFT and of the first gap.
_TIMINGS = (
    ("gateway_queue_time", "From arrival to placement on an instance.", SPAN_BUCKETS, "gateway_queue_s"),
    ("prefill_queue_time", "From placement to the start of prefill.", SPAN_BUCKETS, "prefill_queue_s"),
    ("request_prefill_time", "From the start of prefill to the first token.", SPAN_BUCKETS, "prefill_s"),
    ("kv_transfer_hidden", "Part of a hand-off before first token.", TRANSFER_BUCKETS, "kv_transfer_hidden_s"),
    ("kv_transfer_visible", "Part of a hand-off after first token.", TRANSFER_BUCKETS, "kv_transfer_visible_s"),
    ("request_decode_queue_time", "From KV transfer to the start of decode.", SPAN_BUCKETS, "decode_queue_s"),
    ("first_decode_time", "Of the first decode iteration.", SPAN_BUCKETS, "first_decode_s"),
    ("first_token_gap", "Gap between the first and the second token.", SPAN_BUCKETS, "first_gap_s"),
)
HELD = "held"
_MAX_REQUESTS = 200  # live requests, and finished ones, in a snapshot
# Output tokens and names of blocks of ended requests that are counted at a time, in about half a millisecond; a request
# itself takes as long as 32 of them. More would delay the tokens of all streams.
_TOGETHER, _REQUEST = 1024, 32


class RequestTelemetry:
    """Metrics and recent history of finished requests: latencies, lengths and outcomes."""

    def __init__(self, registry: MetricRegistry, log: ServiceLog, slo: Slo) -> None:
        histogram, counter = registry.histogram, registry.counter
        self._itl = histogram("inter_token_latency_seconds", "Gap between two tokens.", ITL_BUCKETS)
        self._spans = _histograms(registry, _SPANS)
        self._complete_spans = _histograms(registry, _COMPLETE_SPANS)
        self._timings = _histograms(registry, _TIMINGS)
        self._decode = histogram("request_decode_time_seconds", "From the first to the last token.", SPAN_BUCKETS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._output = histogram("request_generation_tokens", "Output tokens of a request.", TOKEN_BUCKETS)
        self._finished = counter("request_success", "Finished requests by reason.", "finished_reason")
        self._good = counter("request_slo", "Finished requests by whether they met the SLO.", "met")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests with output.")
        self._output_tokens = counter("generation_tokens", "Output tokens.")
        self._log, self._slo = log, slo
        self._ended: deque[tuple[Timeline, float]] = deque(maxlen=_MAX_REQUESTS)  # with the times of two tokens each
        self._new: list[tuple[Timeline, float]] = []  # ended requests that no metric includes yet
        self._new_size = 0
        self._latencies = LatencyWindow(slo, log.start_s)

    def ended(self, timeline: Timeline, now: float) -> None:
        self._new.append((timeline, now))
        self._new_size += _REQUEST + timeline.output_tokens + len(timeline.request.prefix_blocks)
        if self._new_size >= _TOGETHER:
            self.count()

    def count(self) -> None:
        """Include all ended requests in the metrics: together, in a fraction of the time that they take one by one."""
        new, self._new, self._new_size = self._new, [], 0
        if not new:
            return
        ended = [timeline for timeline, _ in new]
        good = [self._slo.met_by(timeline) for timeline in ended]
        self._latencies.take(ended)
        for (timeline, now), is_good in zip(new, good, strict=True):
            self._latencies.end(timeline, now, good=is_good)
        if self._slo != Slo():
            for met, count in Counter(good).items():
                self._good.labels("true" if met else "false").inc(count)
        self._observe(ended)
        self._ended.extend((replace(each, token_times_s=each.token_times_s[:2]), now) for each, now in new)

    def _observe(self, ended: list[Timeline]) -> None:
        output_tokens, reasons = sum(each.output_tokens for each in ended), Counter(map(_reason, ended))
        for reason, count in reasons.items():
            self._finished.labels(reason).inc(count)
            self._log.totals[f"ended_{reason}"] += count
        self._log.totals["tokens"] += output_tokens
        self._output_tokens.inc(output_tokens)
        self._prompt_tokens.inc(sum(each.request.prompt_tokens for each in ended if each.output_tokens))
        self._itl.observe([gap_s for each in ended for gap_s in each.itl_s])
        complete = [each for each in ended if each.complete]
        self._prompt.observe([each.request.prompt_tokens for each in complete])
        self._output.observe([each.output_tokens for each in complete])
        self._decode.observe(_known(each.span(Moment.FIRST_TOKEN, Moment.LAST_TOKEN) for each in complete))
        timings = [each.timings for each in ended]
        for spans, timed in ((self._spans, ended), (self._complete_spans, complete), (self._timings, timings)):
            for attribute, histogram in spans.items():
                histogram.observe(_known(map(attrgetter(attribute), timed)))

    def latencies(self, live: Collection[Timeline]) -> LatencyWindow:
        """Return the recent latencies, with those of the tokens of live requests so far."""
        self.count()
        self._latencies.take(live)
        return self._latencies

    def snapshot(self, live: Iterable[Timeline]) -> tuple[RequestSnapshot, ...]:
        """Return recent finished requests and the oldest requests in `live`, ordered by arrival."""
        alive = sorted(live, key=lambda timeline: timeline.moments[Moment.ARRIVED])[:_MAX_REQUESTS]
        self.count()
        shown = [*starmap(_snapshot, self._ended), *map(_snapshot, alive)]
        return tuple(sorted(shown, key=lambda request: request.stages[0].start_s))


def _reason(timeline: Timeline) -> str:
    return "none" if timeline.finish_reason is None else timeline.finish_reason.value


def _known(spans_s: Iterable[float | None]) -> list[float]:
    return [seconds for seconds in spans_s if seconds is not None]


def _histograms(
    registry: MetricRegistry, spans: tuple[tuple[str, str, tuple[float, ...], str], ...]
) -> dict[str, BulkHistogram]:
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
        timings=timeline.timings,
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
