"""Tracing spans of requests."""

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from support.collector import collecting
from support.timelines import SPLIT_MOMENTS, request_timeline
from twofold.errors import ConfigurationError
from twofold.request import FinishReason, Request
from twofold.serving.telemetry.context import CURRENT, context_of
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.serving.telemetry.tracing import Tracer, otlp_exporter

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def traced():
    """Return a function that exports the given request timelines as spans and returns the spans."""

    def run(*timelines, context=None):
        exporter = InMemorySpanExporter()
        telemetry = Telemetry("tiny", tracing=Tracer("tiny", exporter))
        before = CURRENT.set(context)
        for timeline in timelines:
            telemetry.admitted(timeline.request, 0.0)
        CURRENT.reset(before)
        for timeline in timelines:
            telemetry.ended(timeline, 7.0)
        telemetry.close()
        return exporter.get_finished_spans()

    return run


def test_a_request_has_a_span_for_each_stage(traced):
    context = context_of("mine", "/v1/chat/completions", f"00-{TRACE}-{SPAN}-01")
    *stages, request = traced(request_timeline([4.0, 6.0, 7.0], **SPLIT_MOMENTS), context=context)
    assert (request.name, request.kind) == ("chat tiny", SpanKind.SERVER)
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, SPAN)
    assert f"{request.context.span_id:016x}" == context.span.span_id  # the id returned to the client
    assert request.end_time - request.start_time == pytest.approx(6e9)
    assert dict(request.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "twofold",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": 3.0,
        "twofold.request.id": "r",
        "twofold.prefill.instance": "prefill-0",
        "twofold.decode.instance": "decode-0",
    }
    offsets = {s.name: tuple((t - request.start_time) / 1e9 for t in (s.start_time, s.end_time)) for s in stages}
    assert offsets == {
        "queue": pytest.approx((0, 1)),
        "prefill": pytest.approx((1, 3)),
        "hand-off": pytest.approx((1.5, 3.5)),
        "decode queue": pytest.approx((3.5, 4)),
        "decode": pytest.approx((4, 6)),
    }
    assert {stage.parent.span_id for stage in stages} == {request.context.span_id}
    assert [s.attributes["twofold.instance"] for s in stages] == ["prefill-0"] * 2 + ["decode-0"] * 3


def test_a_request_without_a_trace_starts_one(traced):
    """A request without a trace context starts a new trace, which contains the spans of all its choices."""
    context = context_of("mine", "/v1/completions", "")
    spans = traced(request_timeline([4.0], name="a"), request_timeline([4.0], name="b"), context=context)
    first, second = (span for span in spans if span.kind is SpanKind.SERVER)
    assert first.parent is None
    assert f"{first.context.trace_id:032x}" == context.span.trace_id
    assert f"{first.context.span_id:016x}" == context.span.span_id
    assert second.parent.span_id == first.context.span_id
    assert second.context.trace_id == first.context.trace_id


def test_requests_without_http_context_have_separate_traces(traced):
    spans = [
        s
        for s in traced(request_timeline([4.0], name="a"), request_timeline([4.0], name="b"))
        if s.kind is SpanKind.SERVER
    ]
    assert len({span.context.trace_id for span in spans}) == 2


def test_unsampled_traces_are_not_recorded(traced):
    context = context_of("mine", "/v1/completions", f"00-{TRACE}-{SPAN}-00")
    assert not traced(request_timeline([4.0]), context=context)


def test_errors_are_marked_and_aborts_are_not(traced):
    (*_, failed) = traced(request_timeline([4.0], reason=FinishReason.ERROR, prefill_started=2.0))
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "instance_lost")
    (*_, left) = traced(request_timeline([], reason=FinishReason.ABORT))
    assert left.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_a_collector_receives_every_span_before_shutdown(path):
    with collecting() as collector:
        tracer = Tracer("tiny", otlp_exporter(collector.url + path))
        tracer.ended(request_timeline([4.0, 6.0, 7.0], **SPLIT_MOMENTS), None, None, 7.0)
        tracer.close()
    ((where, body),) = collector.received
    assert where == "/v1/traces"
    assert len(collector.spans()) == 6
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert attributes["service.name"] == "twofold"


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", "", "http"])
def test_rejects_an_invalid_endpoint(endpoint):
    with pytest.raises(ConfigurationError, match="http://localhost:4318"):
        otlp_exporter(endpoint)


def test_contexts_of_finished_requests_are_dropped():
    telemetry = Telemetry("tiny")
    CURRENT.set(context_of("mine", "/v1/completions", ""))
    request = Request(id="r", arrival_s=0.0, prompt_tokens=1, output_tokens=1)
    telemetry.admitted(request, 0.0)
    assert len(telemetry._origins) == 1
    telemetry.ended(request_timeline([4.0]), 7.0)
    assert not telemetry._origins
    CURRENT.set(None)
