"""Context of an HTTP request for logs and traces, set by the gateway."""

import re
import secrets
from contextvars import ContextVar

import msgspec

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceParent(msgspec.Struct, frozen=True, kw_only=True):
    """W3C trace context: the ids of a trace and of one of its spans."""

    trace_id: str
    span_id: str
    flags: int = 1

    @classmethod
    def parse(cls, header: str) -> "TraceParent | None":
        """Parse a `traceparent` header (W3C Trace Context, section 3.2). Return None if it is invalid."""
        found = _TRACEPARENT.fullmatch(header.strip())
        if found is None or (found[4] and header.startswith("00")):
            return None
        if not int(found[1], 16) or not int(found[2], 16):
            return None
        return cls(trace_id=found[1], span_id=found[2], flags=int(found[3], 16))

    def child(self) -> "TraceParent":
        """Return the context of a new span in the same trace."""
        return msgspec.structs.replace(self, span_id=secrets.token_hex(8))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


class RequestContext(msgspec.Struct, kw_only=True):
    """Context of an HTTP request. `span` is its trace span, and `parent` the client's span, if any."""

    id: str
    operation: str  # OpenTelemetry's name of the endpoint
    span: TraceParent
    parent: TraceParent | None = None
    generations: int = 0  # outputs started so far


CURRENT: ContextVar[RequestContext | None] = ContextVar("twofold_request", default=None)


def context_of(request_id: str, path: str, traceparent: str) -> RequestContext:
    """Return the logging and tracing context of a request to `path`. `traceparent` is its header, or empty."""
    parent = TraceParent.parse(traceparent) if traceparent else None
    span = parent.child() if parent else TraceParent(trace_id=secrets.token_hex(16), span_id=secrets.token_hex(8))
    operation = "chat" if path.endswith("/chat/completions") else "text_completion"
    return RequestContext(id=request_id, operation=operation, span=span, parent=parent)
