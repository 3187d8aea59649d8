"""Running the generations of one request and answering with what they yield."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from fastapi.responses import Response
from msgspec import UNSET
from starlette.requests import Request

from twofold.errors import InstanceLostError
from twofold.request import FinishReason
from twofold.serving.gateway.choice import Delta
from twofold.serving.gateway.deadline import until
from twofold.serving.gateway.disconnect import unless_disconnected
from twofold.serving.gateway.interleave import interleave
from twofold.serving.gateway.planning import Planned
from twofold.serving.gateway.responses import MaybeUsage, Usage
from twofold.serving.gateway.schemas import StreamOptions
from twofold.serving.gateway.sse import EventStream
from twofold.serving.gateway.usage import UsageCount
from twofold.serving.service import Service


class Form(Protocol):
    """How an endpoint writes its answer, as server-sent events or whole."""

    def events(self, delta: Delta, usage: MaybeUsage) -> bytes:
        """The events of one token."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """The event without choices that closes a stream."""
        ...

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> msgspec.Struct:
        """The whole answer; the deltas of each choice are in the order of its tokens."""
        ...


async def answer_with(
    service: Service,
    request: Request,
    planned: Sequence[Planned],
    form: Form,
    *,
    prompt_tokens: int,
    options: StreamOptions | None,
) -> Response:
    """Run the generations and answer; raises what they raise, and ClientDisconnect.

    `options` None means that the answer is wanted whole.
    """
    deltas = until(
        planned[0].generation.deadline_s, interleave([deltas_of(service, each) for each in planned])
    )
    count = UsageCount(prompt_tokens, planned)
    if options is not None:
        return EventStream(_events(deltas, form, options, count))
    choices = await unless_disconnected(request.receive, _collect(deltas, len(planned), count))
    return Response(msgspec.json.encode(form.whole(choices, count.usage)), media_type="application/json")


async def deltas_of(service: Service, planned: Planned) -> AsyncGenerator[Delta, None]:
    """The deltas of one choice; its generation is closed before the last of them is yielded."""
    last = None
    async with aclosing(service.generate(planned.generation)) as tokens:
        async for token in tokens:
            if token.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                break
            delta = planned.choice.push(token)
            if delta.finish_reason is not None:
                if token.finish_reason is None:
                    service.stop(planned.generation.request.id)
                last = delta
                break
            yield delta
    if last is None:
        raise InstanceLostError("the generation ended before its last token")
    yield last


async def _collect(deltas: AsyncGenerator[Delta, None], choices: int, count: UsageCount) -> list[list[Delta]]:
    collected: list[list[Delta]] = [[] for _ in range(choices)]
    async with aclosing(deltas):
        async for delta in deltas:
            count.add(delta)
            collected[delta.choice].append(delta)
    return collected


async def _events(
    deltas: AsyncGenerator[Delta, None], form: Form, options: StreamOptions, count: UsageCount
) -> AsyncGenerator[bytes, None]:
    # OpenAI writes a null usage into every chunk but the last where the last one has it.
    no_usage: MaybeUsage = None if options.include_usage else UNSET
    async with aclosing(deltas):
        async for delta in deltas:
            count.add(delta)
            usage = count.usage if options.continuous_usage_stats else no_usage
            yield form.events(delta, usage)
    if options.include_usage:
        yield form.usage_event(count.usage)
