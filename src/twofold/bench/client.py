"""Server-sent events of a streamed completion: cut out of the bytes as they come, and decoded.

The client shares its cores with the server it measures, so only the fields named here are decoded.

A reply: what one streamed completion has said so far, and when its tokens came.

The client: sends one request to an OpenAI endpoint, streams the reply and records when its tokens came.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from twofold.bench.endpoint import Endpoint, authorization
from twofold.errors import TwofoldError
from twofold.request import FinishReason, Request
from twofold.timeline import Recorder, Timeline

DONE = b"[DONE]"


class StreamDelta(msgspec.Struct, frozen=True):
    """The new part of a chat message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content)


class StreamChoice(msgspec.Struct, frozen=True):
    """The new part of a completion; `text` for /v1/completions, `delta` for /v1/chat/completions."""

    text: str | None = None
    delta: StreamDelta | None = None
    finish_reason: str | None = None

    @property
    def opens_chat(self) -> bool:
        """Whether this says who speaks, and nothing else."""
        return self.delta is not None and self.delta.role is not None and not self.delta.has_text

    @property
    def has_text(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_text)


class StreamPromptDetails(msgspec.Struct, frozen=True):
    """What became of the tokens of a prompt."""

    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct, frozen=True):
    """Tokens as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: StreamPromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed; 0 where the server does not say."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class StreamErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str | None = None


class StreamEvent(msgspec.Struct, frozen=True):
    """One event of a stream, or the whole body of an error."""

    choices: list[StreamChoice] | None = None
    usage: StreamUsage | None = None
    error: StreamErrorBody | str | None = None
    message: str | None = None  # where some servers put it in an error that has no `error` object

    @property
    def error_message(self) -> str | None:
        """What went wrong, if this event says that something did."""
        if self.error is None:
            return self.message
        return self.error if isinstance(self.error, str) else self.error.message or "no message"


decode_event = msgspec.json.Decoder(StreamEvent).decode


class EventSplitter:
    """Cuts a stream of bytes into the data of its events, however the network has cut the stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """The data of every line that is now complete. (A JSON event is always one `data:` line.)"""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def close(self) -> list[bytes]:
        """What is left when the stream ends without a newline."""
        return self.feed(b"\n")


@dataclass(slots=True)
class Reply:
    """Chunks of a stream with their times (seconds), and what the server says of the whole."""

    chunk_times_s: list[float] = field(default_factory=list)
    chunk_has_text: list[bool] = field(default_factory=list)
    ends_with_notice: bool = False
    finish_reason: str | None = None
    usage: StreamUsage | None = None
    done: bool = False

    def add(self, choice: StreamChoice, now: float) -> None:
        """Take in a chunk; the role that opens a chat is no token, but an empty text may be one."""
        has_text = choice.has_text
        if not choice.opens_chat or choice.finish_reason is not None:
            self.chunk_times_s.append(now)
            self.chunk_has_text.append(has_text)
            self.ends_with_notice = not has_text and choice.finish_reason is not None
        self.finish_reason = choice.finish_reason or self.finish_reason

    @property
    def complete(self) -> bool:
        return self.done or self.finish_reason is not None

    @property
    def finish(self) -> FinishReason:
        """The server's finish reason in Twofold's words; whatever is not a length is a stop."""
        return FinishReason.LENGTH if self.finish_reason == "length" else FinishReason.STOP

    def token_times_s(self) -> list[float]:
        """When each output token came; there are as many as `usage` says, where the server sends it.

        A chunk counts as one token, except a last one that brings nothing but the finish reason. Where usage
        counts fewer tokens, chunks without text brought none. Where it counts more, chunks brought several:
        these have one time, so their gaps are zero, and the first and last time and every gap between chunks
        stay as they were seen. It does not matter for the gaps which chunk is taken to have brought more.
        """
        times = self.chunk_times_s
        without_notice = times[:-1] if self.ends_with_notice else times
        if self.usage is None:
            return list(without_notice)
        tokens = self.usage.completion_tokens
        if tokens < len(times):
            times = without_notice
        if tokens < len(times):
            times = [time for time, text in zip(self.chunk_times_s, self.chunk_has_text, strict=True) if text]
        if tokens <= len(times):
            return list(times)
        return [times[token * len(times) // tokens] for token in range(tokens)] if times else []


_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=None)  # one clock for all of it: `timeout_s`


class RequestFailedError(TwofoldError):
    """A request came to nothing; `reason` is the same for all that failed alike, `detail` tells this one."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
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

    async def send(self, request: Request, body: bytes, reply: Reply | None = None) -> RequestOutcome:
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
            return RequestOutcome(request_id=request.id, chunks=chunks)
        return RequestOutcome(
            request_id=request.id, chunks=chunks, error=failure.reason, detail=failure.detail
        )

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
        event: StreamEvent = decode_event(body)
        if event.error_message is not None:
            return event.error_message
    return body[:300].decode(errors="replace")
