"""An OTLP collector on a socket, which records the exports that it receives."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Collector:
    """A running OTLP collector and the exports that it has received."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.received: list[tuple[str, bytes]] = []

    def spans(self) -> list:
        """Return all received spans as protocol buffer messages."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return [
            span
            for _, body in self.received
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector that accepts all exports while the context is open."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
