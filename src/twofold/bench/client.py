"""The client: sends one request to an OpenAI endpoint, streams the reply and records when its tokens came."""

import asyncio
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from twofold.bench.endpoint import Endpoint, authorization
from twofold.bench.reply import Reply
from twofold.bench.sse import DONE, Event, EventSplitter, decode_event
from twofold.errors import TwofoldError
from twofold.request import FinishReason, Request
from twofold.timeline import Recorder, Timeline

_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=None)  # one clock for all of it: `timeout_s`


class RequestFailedError(TwofoldError):
    """A request came to nothing; `reason` is the same for all that failed alike, `detail` tells this one."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended, besides its timeline. `chunks` counts the events that brought output."""

    request_id: str
    chunks: int
    error: str | None = None
    detail: str | None = None


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every request asks for. `timeout_s` bounds a request from sending it to its last byte."""

    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = True
    chat: bool = False


class Client:
    """Streams completions from one endpoint; an asynchronous context manager that owns the connections."""

    def __init__(
        self, endpoint: Endpoint, recorder: Recorder, config: ClientConfig, api_key: str | None = None
    ) -> None:
        self._endpoint, self._recorder, self._config = endpoint, recorder, config
        self._headers = {"Content-Type": "application/json", **authorization(api_key)}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=_NO_TIMEOUT, headers=self._headers
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def body(self, request: Request, prompt: list[int] | str) -> bytes:
        """The JSON to send; made apart from sending so that a load generator can do it ahead of time."""
        fields: dict[str, object] = {
            "model": self._endpoint.model,
            "max_tokens": request.output_tokens,
            "temperature": self._config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._config.ignore_eos:
            fields["ignore_eos"] = True
        if self._config.chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        return msgspec.json.encode(fields)

    async def send(self, request: Request, body: bytes, reply: Reply | None = None) -> Outcome:
        """Send a request and stream its reply to the end; the recorder gets its timeline, whatever happens.

        A caller that wants to watch the stream while it runs passes the `reply` to fill.

        Nothing that an endpoint or a network does raises here: it ends the request with an error. Only
        cancellation does, and then the request ends as aborted.
        """
        reply = reply or Reply()
        reason, failure = FinishReason.ABORT, None
        timeline = self._recorder.arrive(request, time.monotonic())
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._stream(body, reply)
            reason = reply.finish
        except RequestFailedError as error:
            reason, failure = FinishReason.ERROR, error
        except TimeoutError:
            limit = f"not finished after {self._config.timeout_s:g} s"
            reason, failure = FinishReason.ERROR, RequestFailedError("timeout", limit)
        finally:
            self._record(timeline, reply, reason)
        chunks = len(reply.chunk_times_s)
        if failure is None:
            return Outcome(request_id=request.id, chunks=chunks)
        return Outcome(request_id=request.id, chunks=chunks, error=failure.reason, detail=failure.detail)

    def _record(self, timeline: Timeline, reply: Reply, reason: FinishReason) -> None:
        request = timeline.request
        if reply.usage is not None and reply.usage.prompt_tokens > 0:
            # The server knows the length of a prompt of words; only it does.
            timeline.request = msgspec.structs.replace(request, prompt_tokens=reply.usage.prompt_tokens)
        for token_time_s in reply.token_times_s():
            self._recorder.token(request.id, token_time_s)
        self._recorder.end(request.id, reason)

    async def _stream(self, body: bytes, reply: Reply) -> None:
        path = "chat/completions" if self._config.chat else "completions"
        try:
            async with self._session.post(f"{self._endpoint.base_url}/v1/{path}", data=body) as response:
                if response.status != 200:
                    raise RequestFailedError(f"HTTP {response.status}", _error_text(await response.read()))
                await _read_events(response.content, reply)
        except aiohttp.ClientConnectorError as error:
            raise RequestFailedError("cannot connect", str(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            if not reply.done:  # a connection that breaks after [DONE] has lost nothing
                raise RequestFailedError("disconnected", str(error) or type(error).__name__) from error
        if not reply.complete:
            raise RequestFailedError("incomplete stream", "the stream ended before the reply did")
        if not reply.token_times_s():
            raise RequestFailedError("no tokens", "the reply ended without any output token")


async def _read_events(content: aiohttp.StreamReader, reply: Reply) -> None:
    splitter = EventSplitter()
    async for received in content.iter_any():
        now = time.monotonic()
        for data in splitter.feed(received):
            _take(data, now, reply)
    for data in splitter.close():
        _take(data, time.monotonic(), reply)


def _take(data: bytes, now: float, reply: Reply) -> None:
    if data == DONE:
        reply.done = True
        return
    try:
        event = decode_event(data)
    except msgspec.DecodeError as error:
        raise RequestFailedError("malformed event", f"{error} in {data[:200]!r}") from error
    if event.error_message is not None:
        raise RequestFailedError("error event", event.error_message)
    if event.usage is not None:
        reply.usage = event.usage
    for choice in event.choices or ():
        reply.add(choice, now)


def _error_text(body: bytes) -> str:
    """What an error response says, in whichever of the usual forms it says it."""
    with suppress(msgspec.DecodeError):
        event: Event = decode_event(body)
        if event.error_message is not None:
            return event.error_message
    return body[:300].decode(errors="replace")
