"""Runs a request and sends its output, as a complete response or as server-sent events."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing
from statistics import fmean
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi.responses import Response
from msgspec import UNSET
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from twofold.errors import InstanceLostError
from twofold.request import FinishReason
from twofold.serving.controller.live_request import deadline_error
from twofold.serving.controller.service import Service
from twofold.serving.gateway.gateway import Gateway
from twofold.serving.gateway.generations import PlannedChoice, ResponseSpec, plan
from twofold.serving.gateway.output import Delta
from twofold.serving.gateway.responses import MaybeUsage, PromptTokensDetails, Usage, error_response_for
from twofold.serving.gateway.schemas import GenerationFields, StreamOptions
from twofold.serving.gateway.structured import check_constraint

logger = logging.getLogger(__name__)
PLANNED_AT_ONCE = 32  # choices between which other requests go on
DONE = b"data: [DONE]\n\n"
# The last two keep proxies from buffering tokens.
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
LAST_SEND_S = 3.0  # after the deadline, for the event of the error
_ENCODER = msgspec.json.Encoder()

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Await `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect."""
    # The body must have been read before: `receive` would return parts of it.
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await _cancel(leaving)
        await _cancel(working)


async def send_until(deadline_s: float, scope: Scope, receive: Receive, sending: Coroutine[None, None, None]) -> None:
    """Await `sending`, which ends at the deadline if its client reads.

    Otherwise cancel it then, and abort the connection. Raises ClientDisconnect.
    """
    timeout = asyncio.timeout(max(0.0, deadline_s - time.monotonic()) + LAST_SEND_S)
    try:
        async with timeout:
            await unless_disconnected(receive, sending)
    except TimeoutError:
        abort = scope["state"].get("abort")
        if abort is None or not timeout.expired():
            raise
        abort()
        await _disconnected(receive)
        raise ClientDisconnect from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: "asyncio.Task[T]") -> None:
    if task.done():
        return
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and task.exception() is not None:
        logger.error("error while cancelling the work of a disconnected client", exc_info=task.exception())


async def interleave(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Merge the items of several generators in order of arrival, and close all generators at the end."""
    if len(sources) == 1:  # fast path without task and queue
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield item
        return
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue()
    tasks: list[asyncio.Task[None]] = []
    try:
        for source in sources:
            tasks.append(asyncio.create_task(_pump(source, queue)))
            await asyncio.sleep(0)  # other requests go on between the starts of many
        running = len(tasks)
        while running:
            arrived = await queue.get()
            if arrived is None:
                running -= 1
            elif isinstance(arrived, Exception):
                raise arrived
            else:
                yield arrived
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AsyncGenerator[T, None], queue: "asyncio.Queue[T | Exception | None]") -> None:
    try:
        async with aclosing(source):
            async for item in source:
                queue.put_nowait(item)
        queue.put_nowait(None)
    except Exception as error:  # noqa: BLE001 raised again at the other end of the queue
        queue.put_nowait(error)


async def until_deadline(deadline_s: float, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield from `items`. Raises RequestError (504) if `items` has not ended at the deadline.

    `deadline_s` is a time in seconds on the monotonic clock.
    """
    # The deadline interrupts only the wait for an item, never the consumer. Only one task may iterate.
    waiting, due = True, False
    timeout = asyncio.timeout(None)

    def fall_due() -> None:
        nonlocal due
        due = True
        if waiting:
            timeout.reschedule(0.0)

    timer = asyncio.get_running_loop().call_later(max(0.0, deadline_s - time.monotonic()), fall_due)
    try:
        async with timeout, aclosing(items):
            async for item in items:
                waiting = False
                if due:
                    timeout.reschedule(None)
                yield item
                waiting = True
                if due:
                    timeout.reschedule(0.0)
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise deadline_error() from error
    finally:
        timer.cancel()


class UsageCounter:
    """Counts the tokens of one response."""

    def __init__(self, prompt_tokens: int, planned: Sequence[PlannedChoice]) -> None:
        self._prompt_tokens = prompt_tokens
        self._prompts = [each.prompt for each in planned]
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}  # by prompt

    def add(self, delta: Delta) -> None:
        """Count one output token."""
        self._completion_tokens += not delta.of_prompt
        if delta.token.index == 0 and not delta.of_prompt:
            # Each prompt counts once, with the fewest cached tokens among its choices.
            prompt, cached = self._prompts[delta.choice], delta.token.reused_tokens
            self._cached[prompt] = min(cached, self._cached.get(prompt, cached))

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )


class OpenAIWriter:
    """Ends of streams in OpenAI's API."""

    done = DONE

    def error_event(self, error: Exception) -> bytes:
        return b"data: " + bytes(error_response_for(error).body) + b"\n\n"


def event(body: msgspec.Struct) -> bytes:
    """Encode `body` as one server-sent event."""
    return b"data: " + _ENCODER.encode(body) + b"\n\n"


class EventStream(Response):
    """HTTP response that sends server-sent events, and finally those of the end or of an error."""

    def __init__(self, events: AsyncGenerator[bytes, None], writer: "ResponseWriter", deadline_s: float) -> None:
        super().__init__(headers=HEADERS)
        self._writer, self._deadline_s = writer, deadline_s
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_until(self._deadline_s, scope, receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, b"")  # an error here becomes an ordinary HTTP error
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, first)
            try:
                async for data in events:
                    await self._send(send, data)
            except Exception as error:  # noqa: BLE001 the status is already sent, so the error becomes an event
                last = self._writer.error_event(error)
            else:
                last = self._writer.done
        await self._send(send, last, more=False)

    @staticmethod
    async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})


class ResponseWriter(Protocol):
    """Interface that formats the output of one endpoint, as a complete response or as server-sent events."""

    def events(self, delta: Delta, usage: MaybeUsage) -> bytes:
        """Encode the output of one token as server-sent events."""
        ...

    @property
    def done(self) -> bytes:
        """The end of a complete stream."""
        ...

    def error_event(self, error: Exception) -> bytes:
        """Return the server-sent event with which a stream ends after an error."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """Return the server-sent event with the token counts, for the end of a stream."""
        ...

    def response(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> msgspec.Struct | dict[str, Any]:
        """Build the complete response from the outputs of all choices."""
        ...


async def respond(
    gateway: Gateway,
    request: Request,
    fields: GenerationFields,
    spec: ResponseSpec,
    prompts: list[list[int]],
    writer: ResponseWriter,
) -> Response:
    """Run the prompts of a request and return the response. Raises ClientDisconnect and API errors."""
    await check_constraint(gateway, spec.given)
    planned = []
    for each in plan(gateway, fields, spec, prompts):
        planned.append(each)
        if len(planned) % PLANNED_AT_ONCE == 0:
            await asyncio.sleep(0)
    generated = [generate_deltas(gateway.service, each) for each in planned]
    deltas = until_deadline(spec.deadline_s, interleave(generated))
    usage = UsageCounter(sum(map(len, prompts)), planned)
    if fields.stream:
        events = _events(deltas, writer, fields.stream_options or StreamOptions(), usage)
        return EventStream(events, writer, spec.deadline_s)
    choices = await unless_disconnected(request.receive, _collect(deltas, len(planned), usage))
    choices = list(_best(choices, fields.generated, fields.n or 1))
    return Response(msgspec.json.encode(writer.response(choices, usage.usage)), media_type="application/json")


async def generate_deltas(service: Service, planned: PlannedChoice) -> AsyncGenerator[Delta, None]:
    """Yield the output of one choice, token by token."""
    last = None
    async with aclosing(service.generate(planned.generation)) as tokens:
        async for token in tokens:
            if token.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                break
            if planned.echoes and not token.index:
                *before, end = planned.output.echo(planned.generation.prompt_token_ids, token.prompt_scores)
                for each in before:
                    yield each
                if not planned.outputs:
                    last = msgspec.structs.replace(end, finish_reason=FinishReason.LENGTH)
                    break
                yield end
            delta = planned.output.push(token)
            if delta.finish_reason is not None:
                if token.finish_reason is None:
                    service.stop(planned.generation.request.id)
                last = delta
                break
            yield delta
    # The request has ended before its last delta is yielded.
    if last is None:
        raise InstanceLostError("the generation ended before its last token")
    yield last


async def _collect(deltas: AsyncGenerator[Delta, None], choices: int, count: UsageCounter) -> list[list[Delta]]:
    collected: list[list[Delta]] = [[] for _ in range(choices)]
    async with aclosing(deltas):
        async for delta in deltas:
            count.add(delta)
            collected[delta.choice].append(delta)
    return collected


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


async def _events(
    deltas: AsyncGenerator[Delta, None], writer: ResponseWriter, options: StreamOptions, count: UsageCounter
) -> AsyncGenerator[bytes, None]:
    # With include_usage, OpenAI sends a null usage in every chunk but the last.
    no_usage: MaybeUsage = None if options.include_usage else UNSET
    async with aclosing(deltas):
        async for delta in deltas:
            count.add(delta)
            yield writer.events(delta, count.usage if options.continuous_usage_stats else no_usage)
    if options.include_usage:
        yield writer.usage_event(count.usage)
