"""HTTP on a connection, with a bound on headers and with errors in the form that the API gives them."""

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from twofold.serving.gateway.errors import failure


class _HeadTooLargeError(Exception):
    """Ends the parsing of a request whose head is over the bound."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a request whose request line and headers together exceed `header_bytes`; make one with `bounded`.

    The parser itself takes any number of headers and a header of any length.
    """

    header_bytes: int

    _in_head = False
    _too_large = False
    _received = 0
    _parsed = 0

    def data_received(self, data: bytes) -> None:
        # What came while the head was incomplete belongs to it; the bytes in which it begins are counted as parsed.
        if self._in_head:
            self._received += len(data)
        super().data_received(data)
        if self._in_head and self._received > self.header_bytes and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._in_head = True
        self._received = self._parsed = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Called where the bytes are no HTTP, and for what is too large."""
        if self._too_large:
            most = self.header_bytes
            refused = failure(
                431, f"the headers are larger than the {most} bytes taken here", code="headers_too_large"
            )
        else:
            refused = failure(400, msg or "this is not HTTP", code="invalid_http")
        body = msgspec.json.encode(refused.body)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[refused.status] + head + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > self.header_bytes:
            self._too_large = True
            raise _HeadTooLargeError


def bounded(header_bytes: int) -> type[BoundedProtocol]:
    """The protocol with its bound: the server makes instances of it with arguments of its own."""
    return type("BoundedProtocol", (BoundedProtocol,), {"header_bytes": header_bytes})
