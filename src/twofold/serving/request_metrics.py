"""Metrics that ended requests make."""

from twofold.serving.registry import Registry
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline

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

    def __init__(self, registry: Registry, slo: Slo) -> None:
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
