"""Streaming client for OpenAI endpoints that records the arrival times of tokens."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec

from twofold.bench.endpoint import Endpoint, authorization
from twofold.bench.prompts import Prompt
from twofold.errors import TwofoldError
from twofold.events import Recorder
from twofold.request import FinishReason, Request, RequestTimings
from twofold.timeline import Timeline

DONE = b"[DONE]"
NO_TOKENS = "no tokens"  # reason of a failure


class StreamDelta(msgspec.Struct, frozen=True):
    """Part of a chat message in one chunk of a stream."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content)


class StreamChoice(msgspec.Struct, frozen=True):
    """Output in one streamed chunk: `text` from /v1/completions, `delta` from /v1/chat/completions."""

    text: str | None = None
    delta: StreamDelta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_text)

    @property
    def answer(self) -> str:
        """Text of the answer, without reasoning."""
        return (self.text if self.delta is None else self.delta.content) or ""


class StreamPromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct, frozen=True):
    """Token counts of a request as the server reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: StreamPromptDetails | None = None
    timings: list[RequestTimings] = []

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens that the server found in its prefix cache; None if the server does not report it."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class StreamErrorBody(msgspec.Struct, frozen=True):
    """Error object of OpenAI's API."""

    message: str | None = None


class StreamEvent(msgspec.Struct, frozen=True):
    """One server-sent event of a stream, or the body of an error response."""

    choices: list[StreamChoice] | None = None
    usage: StreamUsage | None = None
    error: StreamErrorBody | str | None = None
    message: str | None = None  # used by some servers without an `error` object

    @property
    def error_message(self) -> str | None:
        """Error message of the event; None if the event is not an error."""
        if self.error is None:
            return self.message
        return self.error if isinstance(self.error, str) else self.error.message or "no message"


decode_event = msgspec.json.Decoder(StreamEvent).decode


class EventSplitter:
    """Splitter of a byte stream into server-sent events. An event may arrive in several fragments."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Add received bytes. Return the data of every `data:` line that is now complete."""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def close(self) -> list[bytes]:
        """End the stream. Return the data of an unterminated last line."""
        return self.feed(b"\n")


@dataclass(slots=True)
class Reply:
    """Chunks of a streamed completion with arrival times in seconds, and the server's token counts."""

    chunk_times_s: list[float] = field(default_factory=list)
    chunk_has_text: list[bool] = field(default_factory=list)
    ends_with_notice: bool = False
    finish_reason: str | None = None
    usage: StreamUsage | None = None
    done: bool = False
    keeps_output: bool = False  # for the next turn of a session
    pause_s: float = 0.0  # after each read, for a slow reader
    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    def add(self, choice: StreamChoice, now: float) -> None:
        """Record a chunk that arrived at `now` (s)."""
        has_text = choice.has_text
        # A chunk that only sets the role of a chat message has no token.
        if has_text or choice.finish_reason is not None or choice.delta is None or choice.delta.role is None:
            self.chunk_times_s.append(now)
            self.chunk_has_text.append(has_text)
            self.ends_with_notice = not has_text and choice.finish_reason is not None
        self.finish_reason = choice.finish_reason or self.finish_reason
        if self.keeps_output:
            self.text += choice.answer
            self.token_ids += choice.token_ids or ()

    @property
    def complete(self) -> bool:
        return self.done or self.finish_reason is not None

    @property
    def finish(self) -> FinishReason:
        """Finish reason of the reply: LENGTH if the server sends `length`, else STOP."""
        return FinishReason.LENGTH if self.finish_reason == "length" else FinishReason.STOP

    def token_times_s(self) -> list[float]:
        """Return the arrival time of each output token in seconds."""
        times = self.chunk_times_s
        without_notice = times[:-1] if self.ends_with_notice else times
        if self.usage is None:  # each chunk is one token
            return list(without_notice)
        # Fewer tokens than chunks: drop chunks without text. More tokens: spread them evenly over the chunks.
        tokens = self.usage.completion_tokens
        if tokens < len(times):
            times = without_notice
        if tokens < len(times):
            times = [time for time, text in zip(self.chunk_times_s, self.chunk_has_text, strict=True) if text]
        if tokens <= len(times):
            return list(times)
        return [times[token * len(times) // tokens] for token in range(tokens)] if times else []


_SLOW_READ_BYTES = 256  # so that the pauses of a slow reader reach the server
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=None)  # `timeout_s` covers the whole request


class RequestFailedError(TwofoldError):
    """Error of a failed request. `reason` is its category, such as `timeout`; `detail` describes this failure."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Success or failure of a request. `chunks` counts the chunks with output, `cached_tokens` the tokens of the prompt
    that the server reports as found in its prefix cache.
    """

    request_id: str
    chunks: int
    cached_tokens: int | None = None  # None if the server does not report it
    timings: RequestTimings | None = None  # None if the server does not report them
    error: str | None = None
    detail: str | None = None


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options for all requests of a client. `timeout_s` is the time from sending to the last byte of a response."""

    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = True
    chat: bool = False


class Client:
    """Asynchronous context manager that streams completions from one endpoint and owns the connections."""

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

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def body(self, request: Request, prompt: Prompt, **more: object) -> bytes:
        """Return the JSON body of a request. `more` has further fields."""
        fields: dict[str, object] = {
            "model": self._endpoint.model,
            "max_tokens": request.output_tokens,
            "temperature": self._config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._config.ignore_eos:
            fields["ignore_eos"] = True
        if self._endpoint.owned_by == "twofold":
            fields["return_timings"] = True
        if self._config.chat:
            fields["messages"] = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
            if request.session and isinstance(prompt, list):
                fields["return_token_ids"] = True  # for the prompt of the next turn
        return msgspec.json.encode(fields | more)

    async def send(self, request: Request, body: bytes, reply: Reply | None = None) -> RequestOutcome:
        """Send a request and record its timeline. A failure is not raised: the returned outcome has the error."""
        reply = reply or Reply()
        reason, failure = FinishReason.ABORT, None  # kept if the request is cancelled
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
        why, detail = (None, None) if failure is None else (failure.reason, failure.detail)
        usage = reply.usage or StreamUsage()
        timings, chunks = next(iter(usage.timings), None), len(reply.chunk_times_s)
        told: dict[str, Any] = {"cached_tokens": usage.cached_tokens, "error": why, "detail": detail}
        return RequestOutcome(request_id=request.id, chunks=chunks, timings=timings, **told)

    def _record(self, timeline: Timeline, reply: Reply, reason: FinishReason) -> None:
        request = timeline.request
        if reply.usage is not None and reply.usage.prompt_tokens > 0:
            # Only the server knows the token count of a text prompt.
            timeline.request = msgspec.structs.replace(request, prompt_tokens=reply.usage.prompt_tokens)
        for token_time_s in reply.token_times_s():
            self._recorder.token(request.id, token_time_s)
        self._recorder.end(request.id, reason)

    async def _stream(self, body: bytes, reply: Reply) -> None:
        path = "chat/completions" if self._config.chat else "completions"
        url, read_bytes = f"{self._endpoint.base_url}/v1/{path}", _SLOW_READ_BYTES if reply.pause_s else None
        try:
            async with self._session.post(url, data=body, read_bufsize=read_bytes) as response:
                if response.status != 200:
                    raise RequestFailedError(f"HTTP {response.status}", error_text(await response.read()))
                await _read_events(response.content, reply)
        except aiohttp.ClientConnectorError as error:
            raise RequestFailedError("cannot connect", str(error)) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            if not reply.done:  # a disconnect after [DONE] is harmless
                raise RequestFailedError("disconnected", str(error) or type(error).__name__) from error
        if not reply.complete:
            raise RequestFailedError("incomplete stream", "the stream ended before the reply did")
        if not reply.token_times_s():
            raise RequestFailedError(NO_TOKENS, "the reply ended without any output token")


async def _read_events(content: aiohttp.StreamReader, reply: Reply) -> None:
    splitter = EventSplitter()
    async for received in content.iter_any():
        now = time.monotonic()
        for data in splitter.feed(received):
            _handle_event(data, now, reply)
        if reply.pause_s:
            await asyncio.sleep(reply.pause_s)
    for data in splitter.close():
        _handle_event(data, time.monotonic(), reply)


def _handle_event(data: bytes, now: float, reply: Reply) -> None:
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


def error_text(body: bytes) -> str:
    """Return the message in the body of a failed answer, else the start of the body."""
    with suppress(msgspec.DecodeError):
        event: StreamEvent = decode_event(body)
        if event.error_message is not None:
            return event.error_message
    return body[:300].decode(errors="replace")
