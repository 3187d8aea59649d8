"""OpenTelemetry traces: one span per finished request, with child spans such as prefill and decode. Attributes follow
the semantic conventions for generative AI (gen_ai.*, release 1.41, in development) or are named twofold.*.
"""

import os
import time
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, set_span_in_context

import twofold
from twofold.errors import ConfigurationError
from twofold.request import FinishReason
from twofold.serving.telemetry.context import RequestContext, TraceParent
from twofold.serving.telemetry.snapshot import Stage, StageName, stages_of
from twofold.timeline import Moment, Timeline

PROVIDER = "twofold"
_EXPORT_S = 5.0
Attribute = str | int | float | list[str]


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to the OTLP/HTTP collector at the URL `endpoint`. Raise ConfigurationError if it is no URL."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 (slow)

    # The variables OTEL_EXPORTER_OTLP_* set headers, certificates and compression.
    url = urlsplit(endpoint)
    if url.scheme not in {"http", "https"} or not url.netloc:
        raise ConfigurationError(f"--otlp-endpoint {endpoint!r} is not a URL: expected one like http://localhost:4318")
    traces = endpoint if url.path.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
    return OTLPSpanExporter(endpoint=traces, timeout=_EXPORT_S)


class Tracer:
    """Creates the trace spans of finished requests."""

    def __init__(self, model: str, exporter: SpanExporter) -> None:
        self._model = model
        self._ids = _GivenIds()
        service = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": PROVIDER}
        resource = Resource.create({**service, "service.version": twofold.__version__})
        self._provider = TracerProvider(id_generator=self._ids, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twofold.serving", twofold.__version__)

    def ended(self, timeline: Timeline, context: RequestContext | None, span: TraceParent | None, now: float) -> None:
        """Create the trace spans of a request that ended at `now`."""
        unix_ns = time.time_ns()

        def ns(moment_s: float) -> int:
            return unix_ns - int((now - moment_s) * 1e9)

        self._ids.given = span
        operation = "text_completion" if context is None else context.operation
        request = self._tracer.start_span(
            f"{operation} {self._model}",
            context=_parent(context, span),
            kind=SpanKind.SERVER,
            attributes=_attributes(timeline, self._model, operation),
            start_time=ns(timeline.moments[Moment.ARRIVED]),
        )
        self._ids.given = None
        if timeline.finish_reason is FinishReason.ERROR:
            request.set_status(StatusCode.ERROR)
        within = set_span_in_context(request)
        end_s = timeline.moments.get(Moment.LAST_TOKEN, now) if timeline.complete else now
        for stage in stages_of(timeline, end_s):
            part = self._tracer.start_span(
                stage.name.value, context=within, attributes=_place(timeline, stage), start_time=ns(stage.start_s)
            )
            part.end(ns(end_s if stage.end_s is None else stage.end_s))
        request.end(ns(end_s))

    def close(self) -> None:
        """Export the remaining spans, which may take some seconds."""
        self._provider.shutdown()


class _GivenIds(RandomIdGenerator):
    given: TraceParent | None = None  # ids already sent to the client; None: random ids

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.given is None else int(self.given.trace_id, 16)

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self.given is None else int(self.given.span_id, 16)


def _parent(context: RequestContext | None, span: TraceParent | None) -> Context:
    above = None if context is None else context.parent
    if context is not None and above is None and span != context.span:
        above = context.span  # further generations are children of the first
    if above is None:
        return Context()
    trace_id, span_id = int(above.trace_id, 16), int(above.span_id, 16)
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(above.flags))
    return set_span_in_context(NonRecordingSpan(remote))


def _attributes(timeline: Timeline, model: str, operation: str) -> dict[str, Attribute]:
    request, reason = timeline.request, timeline.finish_reason
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": request.output_tokens,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.output_tokens,
        "twofold.request.id": request.id,
        "gen_ai.response.finish_reasons": None if reason is None else [reason.value],
        "error.type": "instance_lost" if reason is FinishReason.ERROR else None,
        "gen_ai.response.time_to_first_chunk": timeline.ttft_s,
        "twofold.prefill.instance": timeline.prefill_instance,
        "twofold.decode.instance": timeline.decode_instance,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _place(timeline: Timeline, stage: Stage) -> dict[str, Attribute]:
    prefills = stage.name in {StageName.QUEUE, StageName.PREFILL}
    instance = timeline.prefill_instance if prefills else timeline.decode_instance
    return {} if instance is None else {"twofold.instance": instance}
