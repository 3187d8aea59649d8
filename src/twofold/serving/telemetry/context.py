"""Context of an HTTP request for the logs and traces of its generations.

The gateway's middleware sets it, and asyncio propagates it to the request's tasks.
"""

import re
import secrets
from contextvars import ContextVar

import msgspec

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceParent(msgspec.Struct, frozen=True, kw_only=True):
    """A W3C trace context: ids of a trace and of a span in it."""

    trace_id: str
    span_id: str
    flags: int = 1

    @classmethod
    def parse(cls, header: str) -> "TraceParent | None":
        """Parse a `traceparent` header (W3C Trace Context, section 3.2); None if it is invalid."""
        found = _TRACEPARENT.fullmatch(header.strip())
        if found is None or (found[4] and header.startswith("00")):
            return None
        if not int(found[1], 16) or not int(found[2], 16):
            return None
        return cls(trace_id=found[1], span_id=found[2], flags=int(found[3], 16))

    @classmethod
    def new(cls) -> "TraceParent":
        return cls(trace_id=_random_id(16), span_id=_random_id(8))

    def child(self) -> "TraceParent":
        """Return a new span of the same trace."""
        return msgspec.structs.replace(self, span_id=_random_id(8))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


class RequestContext(msgspec.Struct, kw_only=True):
    """An HTTP request.

    `id` is the request id of the client or the gateway. `span` belongs to the gateway, and `parent` to the client if it
    sent one. `operation` is OpenTelemetry's name for the endpoint, `generations` the number of generations started.
    """

    id: str
    operation: str
    span: TraceParent
    parent: TraceParent | None = None
    generations: int = 0


CURRENT: ContextVar[RequestContext | None] = ContextVar("twofold_request", default=None)


def context_of(request_id: str, path: str, traceparent: str) -> RequestContext:
    """Return the context of a request to `path` with these headers ("" for no `traceparent`)."""
    parent = TraceParent.parse(traceparent) if traceparent else None
    span = TraceParent.new() if parent is None else parent.child()
    operation = "chat" if path.endswith("/chat/completions") else "text_completion"
    return RequestContext(id=request_id, operation=operation, span=span, parent=parent)


def _random_id(size: int) -> str:
    """Return a random hexadecimal id; all zeros is invalid."""
    while True:
        drawn = secrets.token_hex(size)
        if drawn.strip("0"):
            return drawn
