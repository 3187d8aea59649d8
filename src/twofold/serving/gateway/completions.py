"""`POST /v1/completions`."""

from collections.abc import Sequence

import msgspec
from fastapi.responses import Response
from msgspec import UNSET
from starlette.requests import Request

from twofold.serving.gateway.answering import answer_with
from twofold.serving.gateway.body import read_struct
from twofold.serving.gateway.choice import Delta
from twofold.serving.gateway.gateway import Gateway
from twofold.serving.gateway.logprobs import LogprobFormat
from twofold.serving.gateway.middleware import arrival_of
from twofold.serving.gateway.planning import Answer, check_fields, plan, stream_options
from twofold.serving.gateway.prompts import encode_prompts, split_prompts
from twofold.serving.gateway.responses import Completion, CompletionChoice, MaybeUsage, Usage
from twofold.serving.gateway.schemas import CompletionFields
from twofold.serving.gateway.sse import event
from twofold.serving.gateway.terms import terms_of

DEFAULT_MAX_TOKENS = 16


async def complete(gateway: Gateway, request: Request) -> Response:
    """Answer one request; raises RequestError, InstanceLostError and ClientDisconnect."""
    fields = await read_struct(request, CompletionFields, gateway.limits.body_bytes)
    texts_or_ids = split_prompts(fields.prompt)
    check_fields(gateway, fields, len(texts_or_ids))
    arrival = arrival_of(request)
    answer = Answer(
        id=f"cmpl-{arrival.request_id}",
        created=arrival.created,
        arrival_s=arrival.monotonic_s,
        max_tokens=fields.max_tokens,
        capped_tokens=DEFAULT_MAX_TOKENS,
        logprobs=fields.logprobs,
        terms=terms_of(gateway, request, fields, len(texts_or_ids)),
    )
    prompts = await encode_prompts(
        gateway, texts_or_ids, add_special_tokens=fields.add_special_tokens is not False
    )
    planned = plan(gateway, fields, answer, prompts)
    form = CompletionForm(answer, fields, gateway.logprob_format())
    tokens = sum(map(len, prompts))
    options = stream_options(fields)
    return await answer_with(gateway.service, request, planned, form, prompt_tokens=tokens, options=options)


class CompletionForm:
    """Writes text completions."""

    def __init__(self, answer: Answer, fields: CompletionFields, logprobs: LogprobFormat) -> None:
        self._answer = answer
        self._fields = fields
        self._logprobs = logprobs
        self._encode = msgspec.json.Encoder().encode

    def events(self, delta: Delta, usage: MaybeUsage) -> bytes:
        return event(self._encode(self._body([self._choice((delta,))], usage)))

    def usage_event(self, usage: Usage) -> bytes:
        return event(self._encode(self._body([], usage)))

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> Completion:
        return self._body([self._choice(deltas) for deltas in choices], usage)

    def _body(self, choices: list[CompletionChoice], usage: MaybeUsage) -> Completion:
        return Completion(
            id=self._answer.id,
            created=self._answer.created,
            model=self._fields.model,
            choices=choices,
            usage=usage,
        )

    def _choice(self, deltas: Sequence[Delta]) -> CompletionChoice:
        """One choice; the deltas, at least one, are its tokens or the next of them."""
        wanted = self._fields.logprobs is not None
        return CompletionChoice(
            index=deltas[0].choice,
            text="".join(delta.text for delta in deltas),
            logprobs=self._logprobs.completion(deltas) if wanted else None,
            finish_reason=deltas[-1].finish_reason,
            token_ids=[delta.token.token_id for delta in deltas] if self._fields.return_token_ids else UNSET,
        )
