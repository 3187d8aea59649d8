"""Runs a request and sends its output, as a complete response or as server-sent events."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NoReturn, TypeVar

import msgspec
from fastapi.responses import Response
from msgspec import UNSET
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from twofold.errors import InstanceLostError, TwofoldError
from twofold.request import FinishReason, RequestTimings, TokenOutput, TokenRun
from twofold.serving.controller.live_request import OutputSink, deadline_error
from twofold.serving.gateway.gateway import Gateway, RequestRunner
from twofold.serving.gateway.generations import PlannedChoice, PromptInput, ResponseSpec, plan
from twofold.serving.gateway.middleware import Departure
from twofold.serving.gateway.output import Delta
from twofold.serving.gateway.responses import MaybeUsage, PromptTokensDetails, Usage, error_response_for, json_response
from twofold.serving.gateway.schemas import GenerationFields, StreamOptions
from twofold.serving.gateway.structured import check_constraint

logger = logging.getLogger(__name__)
PLANNED_AT_ONCE = 32  # choices between which other requests go on
DONE = b"data: [DONE]\n\n"
# The last two keep proxies from buffering tokens.
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_MOST_HELD_BYTES = 16 * 1024 * 1024  # of a stream whose client does not read: then its connection is aborted
LAST_SEND_S = 3.0  # after the deadline, for the event of the error
_ENCODER = msgspec.json.Encoder()
_FAILED = frozenset({FinishReason.ABORT, FinishReason.ERROR})
_PLACEHOLDER = "\0"  # neither ids nor names of models have this character

T = TypeVar("T")


async def unless_disconnected(departure: Departure, work: Coroutine[None, None, T]) -> T:
    """Await `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect."""
    working = asyncio.create_task(work)
    departure.on_left = working.cancel
    if departure.left:
        working.cancel()
    try:
        return await working
    except asyncio.CancelledError:
        if departure.left:
            raise ClientDisconnect from None
        raise
    except Exception:
        if not departure.left:
            raise
        logger.exception("error while cancelling the work of a disconnected client")
        raise ClientDisconnect from None
    finally:
        departure.on_left = None


async def send_until(deadline_s: float, scope: Scope, sending: Awaitable[None]) -> None:
    """Await `sending`; after the deadline, cancel it and abort the connection. Raises ClientDisconnect."""
    timeout = asyncio.timeout(max(0.0, deadline_s - time.monotonic()) + LAST_SEND_S)
    try:
        async with timeout:
            await sending
    except TimeoutError:
        if not timeout.expired():
            raise
        cut_off(scope)


def cut_off(scope: Scope) -> NoReturn:
    """Abort the connection of a client whose answer cannot be completed. Raises ClientDisconnect."""
    scope["state"]["abort"]()
    raise ClientDisconnect


class UsageCounter:
    """Counts the tokens of one response."""

    def __init__(self, prompt_tokens: Sequence[int], planned: Sequence[PlannedChoice]) -> None:
        self._prompt_tokens = list(prompt_tokens)  # by prompt; 0 until a server has tokenized it
        self._prompts = [each.prompt for each in planned]
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}  # by prompt
        self._timings: dict[int, RequestTimings] = {}  # by choice

    def add(self, delta: Delta) -> None:
        """Count one output token."""
        if delta.of_prompt:
            return
        self.completion_tokens += 1
        if delta.token.timings is not None:
            self._timings[delta.choice] = delta.token.timings
        if delta.token.index == 0:
            # Each prompt counts once, with the fewest cached tokens among its choices.
            prompt, cached = self._prompts[delta.choice], delta.token.reused_tokens
            self._cached[prompt] = min(cached, self._cached.get(prompt, cached))
            self._prompt_tokens[prompt] = delta.token.prompt_tokens or self._prompt_tokens[prompt]

    @property
    def usage(self) -> Usage:
        prompt_tokens = sum(self._prompt_tokens)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
            timings=[each for _, each in sorted(self._timings.items())] or UNSET,
        )


class ResponseWriter(ABC):
    """Formats the output of one endpoint, as a complete response or as server-sent events."""

    done = b""  # the end of a complete stream

    @abstractmethod
    def events(self, delta: Delta, usage: MaybeUsage) -> bytes:
        """Encode the output of one token as server-sent events."""

    @abstractmethod
    def error_event(self, error: Exception) -> bytes:
        """Return the server-sent event with which a stream ends after an error."""

    @abstractmethod
    def response(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> msgspec.Struct | dict[str, Any]:
        """Build the complete response from the outputs of all choices."""

    def usage_event(self, usage: Usage) -> bytes:
        """Return the server-sent event with the token counts, for the end of a stream that has not sent them yet."""
        del usage
        return b""


class OpenAIWriter(ResponseWriter):
    """Ends of streams in OpenAI's API, and events that differ in their text alone."""

    done = DONE

    def __init__(self, *, texts_only: bool) -> None:
        self.texts_only = texts_only
        self._templates: dict[int, tuple[bytes, bytes, bytes]] = {}  # before, between and after texts, by choice

    @abstractmethod
    def whole_event(self, delta: Delta, usage: MaybeUsage) -> bytes:
        """Encode the output of one token as events, all of it anew."""

    def text_events(self, choice: int, texts: Sequence[str], usage: MaybeUsage) -> bytes:
        """Encode the texts of tokens, none of them the first or the last, as one event each. Requires `texts_only`."""
        parts = self._templates.get(choice)
        if parts is None:
            token = TokenOutput(index=1, token_id=0)
            delta = Delta(choice=choice, token=token, text=_PLACEHOLDER, offset=0, finish_reason=None)
            before, after = self.whole_event(delta, usage).split(_ENCODER.encode(_PLACEHOLDER))
            parts = self._templates[choice] = (before, after + before, after)
        before, between, after = parts
        return b"%b%b%b" % (before, between.join(map(_ENCODER.encode, texts)), after)

    def error_event(self, error: Exception) -> bytes:
        return b"data: " + bytes(error_response_for(error).body) + b"\n\n"


def event(body: msgspec.Struct) -> bytes:
    """Encode `body` as one server-sent event."""
    return b"data: " + _ENCODER.encode(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """Encode `body` as one server-sent event with the name `type` of the body."""
    return f"event: {body['type']}\ndata: ".encode() + _ENCODER.encode(body) + b"\n\n"


class EventStream(Response):
    """HTTP response that sends the output of choices as server-sent events, up to those of the end or of an error."""

    def __init__(
        self,
        service: RequestRunner,
        planned: Sequence[PlannedChoice],
        deadline_s: float,
        writer: ResponseWriter,
        options: StreamOptions,
        count: UsageCounter,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._service, self._planned, self._deadline_s = service, planned, deadline_s
        self._writer, self._options, self._count = writer, options, count
        self._events: list[bytes] = []  # to be sent
        self._held_bytes = 0
        self._flushing = False  # whether `_flush` is about to be called
        # With include_usage, OpenAI sends a null usage in every chunk but the last.
        self._no_usage: MaybeUsage = None if options.include_usage else UNSET

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        departure: Departure = state["departure"]
        writer, on_texts = self._writer, None
        if isinstance(writer, OpenAIWriter) and writer.texts_only and not self._options.continuous_usage_stats:
            on_texts = partial(self._add_texts, writer)
        self._choices = RunningChoices(self._service, self._planned, self._deadline_s, departure, self._add, on_texts)
        self._abort = state.get("abort", departure.leave)
        self._write: Callable[[bytes], bool] | None = None  # while the body is open, and the task waits
        await send_until(self._deadline_s, scope, self._send_all(send, state.get("write")))

    def _add(self, delta: Delta) -> None:
        self._count.add(delta)
        usage = self._count.usage if self._options.continuous_usage_stats else self._no_usage
        self._hold(self._writer.events(delta, usage))

    def _add_texts(self, writer: OpenAIWriter, choice: int, texts: Sequence[str]) -> None:
        if self._choices.failure is None:
            self._count.completion_tokens += len(texts)
            data = writer.text_events(choice, texts, self._no_usage)
            if self._events or self._write is None or not self._write(data):
                self._hold(data)

    def _hold(self, data: bytes) -> None:
        self._events.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > _MOST_HELD_BYTES:
            self._abort()
        if not self._flushing:
            self._flushing = True
            self._choices.loop.call_soon(self._flush)  # with all tokens that arrive at a time

    def _flush(self) -> None:
        """Send the events that are held, without a switch to the task if the connection takes them at once."""
        self._flushing = False
        if not (self._events and self._choices.going):
            return  # the task has sent them, or sends them with the end
        if self._write is not None and self._write(b"".join(self._events)):
            self._held_bytes = 0
            self._events.clear()
        else:
            self._choices.wake()

    async def _send_all(self, send: Send, write: Callable[[bytes], bool] | None) -> None:
        choices = self._choices
        try:
            await choices.start()
            await choices.woken()
            if choices.failure is not None and not self._events:
                raise choices.failure  # becomes an ordinary HTTP error
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while choices.going:
                await send({"type": "http.response.body", "body": self._taken(), "more_body": True})
                self._write = write
                await choices.woken()
                self._write = None
            if isinstance(choices.failure, ClientDisconnect):
                raise choices.failure
            self._events.append(self._end(choices.failure))
            await send({"type": "http.response.body", "body": self._taken(), "more_body": False})
        finally:
            choices.close()

    def _taken(self) -> bytes:
        taken, self._held_bytes = b"".join(self._events), 0
        self._events.clear()
        return taken

    def _end(self, failure: Exception | None) -> bytes:
        if failure is not None:  # the status is already sent, so the error becomes an event
            return self._writer.error_event(failure)
        usage = self._writer.usage_event(self._count.usage) if self._options.include_usage else b""
        return usage + self._writer.done


async def respond(
    gateway: Gateway,
    request: Request,
    fields: GenerationFields,
    spec: ResponseSpec,
    prompts: Sequence[PromptInput],
    writer: ResponseWriter,
) -> Response:
    """Run the prompts of a request and return the response. Raises ClientDisconnect and API errors."""
    await check_constraint(gateway, spec.given)
    planned = []
    for each in plan(gateway, fields, spec, prompts):
        planned.append(each)
        if len(planned) % PLANNED_AT_ONCE == 0:
            await asyncio.sleep(0)
    count = UsageCounter([len(prompt) if isinstance(prompt, list) else 0 for prompt in prompts], planned)
    if fields.stream:
        options = fields.stream_options or StreamOptions()
        return EventStream(gateway.service, planned, spec.deadline_s, writer, options, count)
    collected: list[list[Delta]] = [[] for _ in planned]

    def add(delta: Delta) -> None:
        count.add(delta)
        collected[delta.choice].append(delta)

    await RunningChoices(gateway.service, planned, spec.deadline_s, request.state.departure, add).run()
    choices = list(_best(collected, fields.generated, fields.n or 1))
    return json_response(writer.response(choices, count.usage))


class RunningChoices:
    """The choices of one response while they run. `on_delta` gets what each output token adds to a choice.

    If a response needs nothing but the text of most tokens, `on_texts` gets the texts of consecutive ones of a choice.
    """

    def __init__(
        self,
        service: RequestRunner,
        planned: Sequence[PlannedChoice],
        deadline_s: float,
        departure: Departure,
        on_delta: Callable[[Delta], None],
        on_texts: Callable[[int, Sequence[str]], None] | None = None,
    ) -> None:
        """The deadline is a time in seconds on the monotonic clock."""
        self._service, self._planned, self._on_delta, self.on_texts = service, planned, on_delta, on_texts
        self._running = {each.generation.request.id for each in planned}
        self.failure: Exception | None = None  # ClientDisconnect if the client has left
        self.loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self.loop.create_future()
        left_s = max(0.0, deadline_s - time.monotonic())
        self._timer = self.loop.call_later(left_s, lambda: self.fail(deadline_error()))
        self._departure = departure
        departure.on_left = lambda: self.fail(ClientDisconnect())
        if departure.left:
            departure.leave()

    @property
    def going(self) -> bool:
        """Whether more output may follow."""
        return bool(self._running) and self.failure is None

    async def start(self) -> None:
        """Start all choices. Raises RequestError if one is rejected."""
        for each in self._planned:
            if self.failure is not None:
                return
            self._service.submit(each.generation, _ChoiceSink(self, self._service, each))
            if len(self._planned) > 1:
                await asyncio.sleep(0)  # other requests go on between the starts of many

    def wake(self) -> None:
        """Make `woken` return."""
        if not self._woken.done():
            self._woken.set_result(None)

    async def woken(self) -> None:
        """Wait until the end of all choices, or a call of `wake` since the last return."""
        await self._woken
        self._woken = self.loop.create_future()

    async def run(self) -> None:
        """Run all choices to their end. Raises ClientDisconnect and API errors."""
        try:
            await self.start()
            while self.going:
                await self.woken()
            if self.failure is not None:
                raise self.failure
        finally:
            self.close()

    def close(self) -> None:
        """Abort the choices that still run, and end all use of this object."""
        self._timer.cancel()
        self._departure.on_left = None
        self._abort()
        # Cycles of references would wait for a garbage collection: with the response, and with a raised error's frames.
        self._on_delta, self.on_texts, self.failure = _ignore, None, None

    def _abort(self) -> None:
        for request_id in self._running:
            self._service.abort(request_id)
        self._running.clear()

    def add(self, delta: Delta, request_id: str) -> None:
        """Take what a token of the request adds to its choice."""
        if request_id in self._running and self.failure is None:
            self._on_delta(delta)
            if delta.finish_reason is not None:
                self._running.remove(request_id)
                if not self._running:
                    self.wake()

    def fail(self, error: Exception) -> None:
        """End all choices because of an error."""
        if self.going:
            self.failure = error
            self.wake()
            self.loop.call_soon(self._abort)  # the caller may be in the middle of other requests


def _ignore(_delta: Delta) -> None: ...


class _ChoiceSink(OutputSink):
    """Passes the output of one choice to the response."""

    def __init__(self, response: RunningChoices, service: RequestRunner, planned: PlannedChoice) -> None:
        self._response, self._service, self._planned = response, service, planned
        self._request_id = planned.generation.request.id

    def output(self, output: TokenOutput) -> None:
        if output.finish_reason in _FAILED:
            self._response.fail(InstanceLostError("the generation ended before its last token"))
            return
        planned = self._planned
        try:
            if planned.echoes and not output.index:
                self._echo(planned, output)
            if planned.outputs:
                delta = planned.output.push(output)
                if delta.finish_reason is not None and output.finish_reason is None:
                    self._service.stop(self._request_id)  # before the client sees the end
                self._response.add(delta, self._request_id)
        except Exception as error:  # noqa: BLE001  it concerns this response alone
            self._response.fail(error)

    def outputs(self, run: TokenRun) -> None:
        output, on_texts = self._planned.output, self._response.on_texts
        if on_texts is None or not output.skip(run):
            super().outputs(run)
            return
        try:
            on_texts(output.index, run.texts)
        except Exception as error:  # noqa: BLE001  it concerns this response alone
            self._response.fail(error)

    def failed(self, error: TwofoldError) -> None:
        self._response.fail(error)

    def _echo(self, planned: PlannedChoice, first: TokenOutput) -> None:
        """Add the tokens of the prompt. End the choice with them if it has no output."""
        prompt = list(planned.output.echo(planned.generation.prompt_token_ids, first.prompt_scores))
        if not planned.outputs:
            prompt[-1] = msgspec.structs.replace(prompt[-1], finish_reason=FinishReason.LENGTH)
            self._service.abort(self._request_id)
        for delta in prompt:
            self._response.add(delta, self._request_id)


def _best(choices: Sequence[list[Delta]], made: int, wanted: int) -> Iterator[list[Delta]]:
    """Yield the best of each prompt's `made` choices: those with the highest mean log probability of a token."""
    if made == wanted:
        yield from choices
        return
    for start in range(0, len(choices), made):
        best = sorted(choices[start : start + made], key=_mean_logprob, reverse=True)[:wanted]
        for place, deltas in enumerate(best, start // made * wanted):
            yield [msgspec.structs.replace(delta, choice=place) for delta in deltas]


def _mean_logprob(deltas: Sequence[Delta]) -> float:
    return fmean([delta.token.logprob or 0.0 for delta in deltas if not delta.of_prompt] or [0.0])
