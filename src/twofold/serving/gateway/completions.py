"""`POST /v1/completions`."""

from collections.abc import Sequence

import msgspec
from fastapi.responses import Response
from msgspec import UNSET
from starlette.requests import Request

from twofold.errors import RequestError
from twofold.serving.gateway.gateway import Gateway, read_struct
from twofold.serving.gateway.generations import (
    ResponseSpec,
    check_fields,
    plan,
    request_options,
    stream_options,
)
from twofold.serving.gateway.middleware import arrival_of
from twofold.serving.gateway.output import Delta, LogprobFormat
from twofold.serving.gateway.responses import Completion, CompletionChoice, MaybeUsage, Usage
from twofold.serving.gateway.schemas import CompletionFields, Prompt
from twofold.serving.gateway.streaming import event, respond


async def encode_prompts(
    gateway: Gateway, prompts: Sequence[str | list[int]], *, add_special_tokens: bool
) -> list[list[int]]:
    """One list of token ids per prompt; raises RequestError if any of them is invalid."""
    texts = [each for each in prompts if isinstance(each, str)]
    if texts:
        encoded = await encode_texts(gateway, texts, add_special_tokens=add_special_tokens)
    else:
        encoded = [check_token_ids(gateway, each) for each in prompts if isinstance(each, list)]
    for token_ids in encoded:
        check_tokens(gateway, len(token_ids), "prompt")
    return encoded


def split_prompts(prompt: Prompt) -> list[str | list[int]]:
    """Split the field into prompts: a text, a list of token ids, or a list of either kind."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt: the list is empty; send at least one prompt", param="prompt")
    ids = [each for each in prompt if isinstance(each, int)]
    if len(ids) == len(prompt):
        return [ids]
    texts_or_lists = [each for each in prompt if not isinstance(each, int)]
    if len(texts_or_lists) == len(prompt) and len({type(each) for each in prompt}) == 1:
        return texts_or_lists
    raise RequestError(
        "prompt: the list mixes kinds; send all strings, all token ids or all lists of token ids",
        param="prompt",
    )


async def encode_texts(
    gateway: Gateway, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    tokenizer = gateway.require_tokenizer("prompt")
    for text in texts:
        check_length(gateway, len(text), "prompt")
    encoded = await tokenizer.encode(texts, add_special_tokens=add_special_tokens)
    if all(encoded):
        return encoded
    if tokenizer.bos_token_id is None:
        raise RequestError(
            "prompt: a text is empty, and this model has no beginning-of-sequence token", param="prompt"
        )
    return [token_ids or [tokenizer.bos_token_id] for token_ids in encoded]


def check_length(gateway: Gateway, characters: int, field: str) -> None:
    """Reject texts that are too long or cannot fit the context, before tokenization."""
    most = gateway.limits.prompt_characters
    if most is not None and characters > most:
        raise RequestError(
            f"{field}: {characters} characters are more than the limit of {most}",
            param=field,
            code="prompt_too_long",
        )
    context = gateway.service.model.max_model_len
    tokens = characters // gateway.require_tokenizer(field).longest_token
    if tokens > context:
        raise RequestError(
            f"{field}: {characters} characters are at least {tokens} tokens, "
            f"but the context length of this model is {context} tokens",
            param=field,
            code="context_length_exceeded",
        )


def check_tokens(gateway: Gateway, tokens: int, field: str) -> None:
    """Reject prompts over the token limit."""
    most = gateway.limits.prompt_tokens
    if most is not None and tokens > most:
        raise RequestError(
            f"{field}: {tokens} tokens are more than the limit of {most}", param=field, code="prompt_too_long"
        )


def check_token_ids(gateway: Gateway, token_ids: list[int]) -> list[int]:
    if not token_ids:
        raise RequestError("prompt: a list of token ids is empty; send at least one token", param="prompt")
    vocab_size = gateway.service.model.vocab_size
    if max(token_ids) >= vocab_size:
        raise RequestError(
            f"prompt: token id {max(token_ids)} is not in the vocabulary of {vocab_size} tokens",
            param="prompt",
        )
    return token_ids


DEFAULT_MAX_TOKENS = 16


async def complete(gateway: Gateway, request: Request) -> Response:
    """Handle one request; raises RequestError, InstanceLostError and ClientDisconnect."""
    fields = await read_struct(request, CompletionFields, gateway.limits.body_bytes)
    texts_or_ids = split_prompts(fields.prompt)
    check_fields(gateway, fields, len(texts_or_ids))
    arrival = arrival_of(request)
    answer = ResponseSpec(
        id=f"cmpl-{arrival.request_id}",
        created=arrival.created,
        arrival_s=arrival.monotonic_s,
        max_tokens=fields.max_tokens,
        capped_tokens=DEFAULT_MAX_TOKENS,
        logprobs=fields.logprobs,
        terms=request_options(gateway, request, fields, len(texts_or_ids)),
    )
    prompts = await encode_prompts(
        gateway, texts_or_ids, add_special_tokens=fields.add_special_tokens is not False
    )
    planned = plan(gateway, fields, answer, prompts)
    form = CompletionWriter(answer, fields, gateway.logprob_format())
    tokens = sum(map(len, prompts))
    options = stream_options(fields)
    return await respond(gateway.service, request, planned, form, prompt_tokens=tokens, options=options)


class CompletionWriter:
    """Formats text completions."""

    def __init__(self, answer: ResponseSpec, fields: CompletionFields, logprobs: LogprobFormat) -> None:
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
        """Format one choice from at least one of its deltas."""
        wanted = self._fields.logprobs is not None
        return CompletionChoice(
            index=deltas[0].choice,
            text="".join(delta.text for delta in deltas),
            logprobs=self._logprobs.completion(deltas) if wanted else None,
            finish_reason=deltas[-1].finish_reason,
            token_ids=[delta.token.token_id for delta in deltas] if self._fields.return_token_ids else UNSET,
        )
