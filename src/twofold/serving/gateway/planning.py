"""From prompts and fields to the generations that answer one HTTP request."""

import secrets

import msgspec

from twofold.errors import RequestError
from twofold.request import Generation, Request, SamplingParams
from twofold.serving.gateway.choice import Choice
from twofold.serving.gateway.gateway import Gateway
from twofold.serving.gateway.limits import Limits
from twofold.serving.gateway.sampling import base_seed, choice_seed, sampling_of
from twofold.serving.gateway.schemas import GenerationFields, StreamOptions
from twofold.serving.gateway.terms import Terms
from twofold.serving.gateway.unsupported import refuse_unsupported


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says besides its text: its id, when it was made (unix seconds) and for whom it is.

    `arrival_s` is on the monotonic clock; `max_tokens` None means whatever of the context is left, and
    `capped_tokens` is a bound that gives way where the context is shorter. `terms` go with every generation.
    """

    id: str
    created: int
    arrival_s: float
    max_tokens: int | None
    capped_tokens: int | None = None
    logprobs: int | None = None
    terms: Terms


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, of the `prompt`-th prompt from 0 on, and the choice that its tokens become."""

    generation: Generation
    choice: Choice
    prompt: int


def check_fields(gateway: Gateway, fields: GenerationFields, prompts: int) -> None:
    """Raise RequestError on what can be told wrong before the `prompts` prompts are tokenized."""
    gateway.check_model(fields.model)
    n, limits = fields.n or 1, gateway.limits
    refuse_unsupported(fields, n)
    if fields.stream_options is not None and not fields.stream:
        raise RequestError(
            "stream_options: they are for streams only; send stream: true with them", param="stream_options"
        )
    if n > limits.choices:
        raise RequestError(f"n: {n} is more than the limit of {limits.choices}", param="n")
    if n * prompts > limits.generations:
        raise RequestError(
            f"n: {prompts} prompts with n {n} make {n * prompts} generations, more than the limit of "
            f"{limits.generations} in one request",
            param="n",
        )
    if stop_strings(fields, limits):
        gateway.require_tokenizer("stop")


def stop_strings(fields: GenerationFields, limits: Limits) -> tuple[str, ...]:
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if len(stops) > limits.stop_strings:
        raise RequestError(
            f"stop: {len(stops)} stop strings are more than the limit of {limits.stop_strings}", param="stop"
        )
    if "" in stops:
        raise RequestError("stop: a stop string is empty", param="stop")
    if any(len(stop) > limits.stop_characters for stop in stops):
        raise RequestError(
            f"stop: a stop string is longer than the limit of {limits.stop_characters} characters",
            param="stop",
        )
    return stops


def plan(
    gateway: Gateway, fields: GenerationFields, answer: Answer, prompts: list[list[int]]
) -> list[Planned]:
    """`n` generations per prompt, in the order of their choices: prompt by prompt.

    Choice i of every prompt is sampled with seed + i, so that a prompt gives the same choices alone and in
    a list.
    """
    n = fields.n or 1
    stops = stop_strings(fields, gateway.limits)
    planned = []
    for number, token_ids in enumerate(prompts):
        sampling = _sampling(gateway, fields, answer, len(token_ids))
        seed = base_seed(fields.seed)
        for nth in range(n):
            index = number * n + nth
            seeded = msgspec.structs.replace(sampling, seed=choice_seed(seed, nth))
            generation = _generation(answer, index, token_ids, seeded)
            choice = Choice(index, gateway.tokenizer, fields, stops)
            planned.append(Planned(generation=generation, choice=choice, prompt=number))
    return planned


def _sampling(
    gateway: Gateway, fields: GenerationFields, answer: Answer, prompt_tokens: int
) -> SamplingParams:
    model = gateway.service.model
    max_tokens = answer.max_tokens
    if max_tokens is None:
        left = model.max_model_len - prompt_tokens
        max_tokens = max(1, left if answer.capped_tokens is None else min(answer.capped_tokens, left))
    if prompt_tokens + max_tokens > model.max_model_len:
        raise RequestError(
            f"the context length of this model is {model.max_model_len} tokens, but {prompt_tokens} tokens "
            f"of prompt and {max_tokens} of output make {prompt_tokens + max_tokens}; shorten one of them",
            param="max_tokens" if prompt_tokens < model.max_model_len else None,
            code="context_length_exceeded",
        )
    return sampling_of(fields, model, max_tokens=max_tokens, logprobs=answer.logprobs)


def _generation(answer: Answer, index: int, token_ids: list[int], sampling: SamplingParams) -> Generation:
    terms = answer.terms
    request = Request(
        # The client may choose the answer's id, and may choose the same one twice; this one must be unique.
        id=f"{answer.id}-{index}-{secrets.token_hex(16)}",
        arrival_s=answer.arrival_s,
        prompt_tokens=len(token_ids),
        output_tokens=sampling.max_tokens,
        retain_s=terms.retain_s,
    )
    return Generation(
        request=request,
        prompt_token_ids=token_ids,
        sampling=sampling,
        key=terms.key,
        priority=terms.priority,
        deadline_s=terms.deadline_s,
        cache_salt=terms.cache_salt,
    )


def stream_options(fields: GenerationFields) -> StreamOptions | None:
    """How to stream; None where the answer is wanted whole."""
    return (fields.stream_options or StreamOptions()) if fields.stream else None
