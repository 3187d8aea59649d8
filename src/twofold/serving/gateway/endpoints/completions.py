"""The endpoint `POST /v1/completions`."""

from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import msgspec
from fastapi.responses import Response
from msgspec import UNSET
from starlette.requests import Request

from twofold.serving.gateway.gateway import Gateway, read_struct
from twofold.serving.gateway.generations import PromptInput, ResponseSpec, response_spec, server_fields
from twofold.serving.gateway.output import Delta, LogprobFormat
from twofold.serving.gateway.responses import Completion, CompletionChoice, MaybeTokenIds, MaybeUsage, Usage
from twofold.serving.gateway.schemas import CompletionFields, Prompt, check_limit, invalid
from twofold.serving.gateway.streaming import OpenAIWriter, event, respond
from twofold.serving.gateway.tokenizer import off_loop

_TOKENS_CHECKED = 16  # token ids that are checked in the time of encoding a character
_UNREAD = msgspec.defstruct("Unread", [("prompt", msgspec.Raw)], bases=(CompletionFields,), frozen=True, kw_only=True)


async def complete(gateway: Gateway, request: Request) -> Response:
    """Answer `POST /v1/completions`. Raises RequestError, InstanceLostError and ClientDisconnect."""
    fields, sent = await _read(gateway, request)
    given = [] if sent else split_prompts(gateway, fields.prompt)
    spec = response_spec(gateway, request, fields, prompts=len(given) or 1)
    spec = msgspec.structs.replace(spec, server_fields=server_fields(gateway, request, fields))
    prompts: Sequence[PromptInput] = [sent] if sent else await _inputs(gateway, fields, given)
    writer = CompletionWriter(spec, fields, LogprobFormat(gateway.tokenizer), prompts)
    return await respond(gateway, request, fields, spec, prompts, writer)


async def _read(gateway: Gateway, request: Request) -> tuple[CompletionFields, bytes]:
    """Return a request's fields, and its prompt's JSON string if servers get it: decoding a long one takes long."""
    if gateway.service.takes_text:
        fields = await read_struct(request, cast(type[CompletionFields], _UNREAD), gateway.bodies)
        sent = bytes(cast(msgspec.Raw, fields.prompt))
        if sent.startswith(b'"') and gateway.sends_text(fields) and _fits(gateway, fields, len(sent)):
            with suppress(UnicodeDecodeError):
                _ = sent.isascii() or sent.decode()
                return fields, sent
    return await read_struct(request, CompletionFields, gateway.bodies), b""


def _fits(gateway: Gateway, fields: CompletionFields, size: int) -> bool:
    """Return whether a text of `size` bytes is within all limits, even if each byte is a character."""
    tokens, limits = gateway.least_tokens(size), gateway.limits
    whole = tokens + (fields.token_limit or fields.default_max_tokens) <= gateway.service.model.max_model_len
    most = limits.generated_prompt_tokens // fields.generated
    return whole and len('""') < size <= (limits.prompt_characters or size) and tokens <= most


def split_prompts(gateway: Gateway, prompt: Prompt) -> list[str | list[int]]:
    """Return the prompts of a request as a list of texts or of token id lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "the list is empty; send at least one prompt")
    if isinstance(prompt[0], int):
        gateway.check_context(len(prompt), "prompt")
    else:
        check_limit("prompt", len(prompt), gateway.limits.generations, "prompts")
    ids = [each for each in prompt if isinstance(each, int)]
    if len(ids) == len(prompt):
        return [ids]
    texts_or_lists = [each for each in prompt if not isinstance(each, int)]
    if len(texts_or_lists) == len(prompt) and len({type(each) for each in prompt}) == 1:
        return texts_or_lists
    raise invalid("prompt", "the list mixes kinds; send all strings, all token ids or all lists of token ids")


async def _inputs(gateway: Gateway, fields: CompletionFields, prompts: list[str | list[int]]) -> Sequence[PromptInput]:
    texts = [each for each in prompts if isinstance(each, str) and each]
    if len(texts) < len(prompts) or not gateway.sends_text(fields):
        return await encode_prompts(gateway, prompts, add_special_tokens=fields.adds_special_tokens)
    for each in texts:
        gateway.check_length(len(each), "prompt")
    return texts


async def encode_prompts(
    gateway: Gateway, prompts: Sequence[str | list[int]], *, add_special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of each prompt. Raises RequestError if any prompt is invalid."""
    texts = [each for each in prompts if isinstance(each, str)]
    if texts:
        encoded = await _encode_texts(gateway, texts, add_special_tokens=add_special_tokens)
    else:
        lists = [each for each in prompts if isinstance(each, list)]
        for each in lists:
            gateway.check_context(len(each), "prompt")

        def work() -> list[list[int]]:
            return [_checked_ids(gateway, each) for each in lists]

        encoded = await off_loop(sum(map(len, lists)) // _TOKENS_CHECKED, work)
    for token_ids in encoded:
        gateway.check_tokens(len(token_ids), "prompt")
    return encoded


async def _encode_texts(gateway: Gateway, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    tokenizer = gateway.require_tokenizer("prompt")
    for text in texts:
        gateway.check_length(len(text), "prompt")
    encoded = await tokenizer.encode(texts, add_special_tokens=add_special_tokens)
    if all(encoded):
        return encoded
    if tokenizer.bos_token_id is None:
        raise invalid("prompt", "a text is empty, and this model has no beginning-of-sequence token")
    return [token_ids or [tokenizer.bos_token_id] for token_ids in encoded]


def _checked_ids(gateway: Gateway, token_ids: list[int]) -> list[int]:
    if not token_ids:
        raise invalid("prompt", "a list of token ids is empty; send at least one token")
    vocab_size = gateway.service.model.vocab_size
    if max(token_ids) >= vocab_size:
        raise invalid("prompt", f"token id {max(token_ids)} is not in the vocabulary of {vocab_size} tokens")
    return token_ids


class CompletionWriter(OpenAIWriter):
    """Formats the response bodies and stream events of text completions."""

    def __init__(
        self, spec: ResponseSpec, fields: CompletionFields, logprobs: LogprobFormat, prompts: Sequence[PromptInput]
    ) -> None:
        super().__init__(texts_only=fields.logprobs is None and not fields.return_token_ids)
        self._spec, self._fields, self._logprobs, self._prompts = spec, fields, logprobs, prompts

    def events(self, delta: Delta, usage: MaybeUsage) -> bytes:
        if self.texts_only and delta.finish_reason is None and not isinstance(usage, Usage):
            return self.text_events(delta.choice, (delta.text,), usage)
        return self.whole_event(delta, usage)

    def whole_event(self, delta: Delta, usage: MaybeUsage) -> bytes:
        return event(self._body([self._choice((delta,))], usage))

    def usage_event(self, usage: Usage) -> bytes:
        return event(self._body([], usage))

    def response(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> Completion:
        return self._body([self._choice(deltas) for deltas in choices], usage)

    def _body(self, choices: list[CompletionChoice], usage: MaybeUsage) -> Completion:
        id_, created = self._spec.id, self._spec.arrival.created
        return Completion(id=id_, created=created, model=self._fields.model, choices=choices, usage=usage)

    def _choice(self, deltas: Sequence[Delta]) -> CompletionChoice:
        wanted = self._fields.return_token_ids
        return CompletionChoice(
            index=deltas[0].choice,
            text="".join(delta.text for delta in deltas),
            logprobs=None if self._fields.logprobs is None else self._logprobs.completion(deltas),
            finish_reason=deltas[-1].finish_reason,
            token_ids=[each.token.token_id for each in deltas if not each.of_prompt] if wanted else UNSET,
            prompt_token_ids=self._prompt_ids(deltas[0]) if wanted else UNSET,
        )

    def _prompt_ids(self, delta: Delta) -> MaybeTokenIds:
        """Return the token ids of a choice's prompt, which come once, with the first output token."""
        prompt = self._prompts[delta.choice // (self._fields.n or 1)]
        return UNSET if not isinstance(prompt, list) or delta.token.index or delta.of_prompt else prompt
