"""W3C trace contexts of client requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.serving.telemetry.context import TraceParent, context_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_clients_trace_is_continued():
    context = context_of("mine", "/v1/chat/completions", f"00-{TRACE}-{SPAN}-00")
    assert (context.id, context.operation) == ("mine", "chat")
    assert context.parent == TraceParent(trace_id=TRACE, span_id=SPAN, flags=0)
    assert (context.span.trace_id, context.span.flags) == (TRACE, 0)
    assert context.span.span_id != SPAN


def test_a_trace_is_started_without_a_header():
    context = context_of("mine", "/v1/completions", "")
    assert (context.parent, context.operation) == (None, "text_completion")
    assert TraceParent.parse(str(context.span)) == context.span


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
    ],
)
def test_an_invalid_traceparent_is_ignored(header):
    assert TraceParent.parse(header) is None


def test_a_newer_traceparent_version_is_accepted():
    assert TraceParent.parse(f"01-{TRACE}-{SPAN}-01-more") is not None


@given(st.text())
def test_any_header_is_parsed_without_error(header):
    context = context_of("mine", "/v1/completions", header)
    assert TraceParent.parse(str(context.span)) == context.span
