"""A proxy in Python with no function but to decode a server's events and to forward their texts.

    python bench/gateway/bare_proxy.py --port PORT --server URL

It shows how much of a router's CPU time is the cost of sockets, HTTP and JSON in Python. It has no keys, limits,
deadlines, metrics, stop strings, routing or replay, and trusts its clients and the server.
"""

import argparse
import asyncio
import gc
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

EVENT = b'data: {"id":"bare","object":"text_completion","choices":[{"index":0,"text":%b,"finish_reason":%b}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
ASK = b"POST /v1/completions HTTP/1.1\r\nhost: server\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class Event(msgspec.Struct):
    choices: list[Choice] = []


DECODER, ENCODE = msgspec.json.Decoder(Event), msgspec.json.Encoder().encode


class Upstream(asyncio.Protocol):
    """Connection to the server. `client` gets the answer."""

    client: "Downstream"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._parser = httptools.HttpResponseParser(self)
        self._left = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.client.begin()

    def on_body(self, body: bytes) -> None:
        if not self.client.streams:
            self.client.body += body
            return
        lines = (self._left + body).split(b"\n")
        self._left = lines.pop()
        events = b"".join(map(forwarded, lines))
        if events:
            self.client.transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    def on_message_complete(self) -> None:
        self.client.end()
        IDLE.append(self)


IDLE: list[Upstream] = []


def forwarded(line: bytes) -> bytes:
    """Return the event that a client gets for the line of an event of the server."""
    data = line.removeprefix(b"data: ")
    if not data:
        return b""
    choices = [] if data == b"[DONE]" else DECODER.decode(data).choices
    if not choices:  # the end, or the usage
        return line + b"\n\n"
    return b"".join(EVENT % (ENCODE(each.text), ENCODE(each.finish_reason)) for each in choices)


class Downstream(asyncio.Protocol):
    """Connection to a client."""

    def __init__(self, host: str, port: int) -> None:
        self._server = host, port

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self.body = url, b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self._url == b"/health":
            self.transport.write(HEALTHY)
            return
        fields = msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        self.streams = bytes(fields.get("stream", b"")) == b"true"
        asyncio.ensure_future(self._ask(msgspec.json.encode(fields)))  # noqa: RUF006  (ends at once)

    async def _ask(self, body: bytes) -> None:
        if IDLE:
            upstream = IDLE.pop()
        else:
            _, upstream = await asyncio.get_running_loop().create_connection(Upstream, *self._server)
        upstream.client, self.body = self, b""
        upstream.transport.write(ASK % len(body) + body)

    def begin(self) -> None:
        if self.streams:
            self.transport.write(HEAD)

    def end(self) -> None:
        if self.streams:
            self.transport.write(b"0\r\n\r\n")
        else:
            size = b"content-length: %d\r\n\r\n" % len(self.body)
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + size + self.body)


async def serve(port: int, host: str, server_port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Downstream(host, server_port), "127.0.0.1", port)
    gc.freeze()
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--server", required=True, help="URL of the vLLM server")
    given = parser.parse_args()
    server = urlsplit(given.server)
    uvloop.run(serve(given.port, server.hostname or "", server.port or 80))


if __name__ == "__main__":
    main()
