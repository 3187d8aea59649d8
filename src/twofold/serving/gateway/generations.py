"""For how long a request wants its prompt kept: what OpenAI calls prompt caching, as it is meant here.

From request fields to how the next token is picked.

The terms of a request: on whose behalf, how urgent, until when it is of use, and for how long its prompt may be.

From prompts and fields to the generations that answer one HTTP request.
"""

import math
import secrets
from typing import Final

import msgspec
from starlette.requests import Request as HttpRequest

from twofold.errors import RequestError
from twofold.request import Generation, Request, SamplingParams
from twofold.serving.controller.service import ServedModel
from twofold.serving.gateway.gateway import Gateway, RequestLimits
from twofold.serving.gateway.keys import ApiKey
from twofold.serving.gateway.middleware import arrival_of
from twofold.serving.gateway.output import OutputProcessor
from twofold.serving.gateway.schemas import GenerationFields, StreamOptions, refuse_unsupported

# OpenAI wrote the first as the second until 2026, and clients still do. Both mean: as long as there is room.
RETENTIONS: Final = {"in_memory": 0.0, "in-memory": 0.0, "24h": 24 * 3600.0}
MODES: Final = ("implicit",)

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


def retention_s(fields: GenerationFields, longest_s: float) -> float:
    """Seconds for which the prompt is to be kept, at most `longest_s`; 0 asks for nothing.

    Of `prompt_cache_retention` and `prompt_cache_options.ttl` the longer counts. Raises RequestError.
    """
    wanted_s = 0.0
    if fields.prompt_cache_retention is not None:
        if fields.prompt_cache_retention not in RETENTIONS:
            raise RequestError(
                f"prompt_cache_retention: {fields.prompt_cache_retention!r} is none of in_memory and 24h",
                param="prompt_cache_retention",
                code="invalid_value",
            )
        wanted_s = RETENTIONS[fields.prompt_cache_retention]
    options = fields.prompt_cache_options
    if options is not None:
        if options.mode is not None and options.mode not in MODES:
            raise RequestError(
                "prompt_cache_options.mode: not supported by this service, which keeps every full block of a prompt; "
                "leave it out or send implicit",
                param="prompt_cache_options.mode",
                code="unsupported_parameter",
            )
        if options.ttl is not None:
            ttl = options.ttl.strip()  # the pattern lets a last newline through
            wanted_s = max(wanted_s, int(ttl[:-1]) * _UNITS[ttl[-1]])
    return min(wanted_s, longest_s)


SEED_BITS = 63
_SEED_MASK = (1 << SEED_BITS) - 1


def sampling_of(
    fields: GenerationFields, model: ServedModel, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Raises RequestError where a value fits its type but not the model or another field."""
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: {min_tokens} is more than the {max_tokens} tokens that may be generated",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        # Keeping more tokens than there are is keeping all of them.
        top_k=min(max(fields.top_k or 0, 0), model.vocab_size),
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=stop_token_ids_of(fields, model),
        logprobs=logprobs,
    )


def stop_token_ids_of(fields: GenerationFields, model: ServedModel) -> tuple[int, ...]:
    for token_id in fields.stop_token_ids or ():
        if token_id >= model.vocab_size:
            raise RequestError(
                f"stop_token_ids: {token_id} is not in the vocabulary of {model.vocab_size} tokens",
                param="stop_token_ids",
            )
    return tuple(fields.stop_token_ids or ())


def base_seed(seed: int | None) -> int:
    """The seed of choice 0 of a prompt: the user's, or a random one where the user gave none."""
    return secrets.randbits(SEED_BITS) if seed is None else seed & _SEED_MASK


def choice_seed(base: int, choice: int) -> int:
    """The seed of choice `choice` of a prompt; stays within 63 bits, so a negative seed is a large one."""
    return (base + choice) & _SEED_MASK


TIMEOUT_HEADER = "X-Request-Timeout"


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is the API key's name (empty: none), `priority` vLLM's, `deadline_s` on the monotonic clock.

    Its prompt is to be kept for `retain_s` seconds for those that begin alike, and have the same `cache_salt`.
    """

    key: str
    priority: int
    deadline_s: float
    retain_s: float
    cache_salt: str


def request_options(
    gateway: Gateway, request: HttpRequest, fields: GenerationFields, prompts: int
) -> RequestOptions:
    """Raises RequestError on a timeout or a retention that is none, and on more generations than the key may have."""
    arrival = arrival_of(request)
    if arrival.key is not None:
        _check_key(arrival.key, (fields.n or 1) * prompts)
    return RequestOptions(
        key="" if arrival.key is None else arrival.key.name,
        priority=fields.priority or 0,
        deadline_s=arrival.monotonic_s + _timeout_s(gateway, request, fields),
        retain_s=retention_s(fields, gateway.limits.longest_retention_s),
        cache_salt=fields.cache_salt or "",
    )


def _timeout_s(gateway: Gateway, request: HttpRequest, fields: GenerationFields) -> float:
    """The shorter of the field and the header; the service's own where there is neither."""
    wanted = []
    if fields.timeout is not None:
        wanted.append(("timeout", fields.timeout))
    given = request.headers.get(TIMEOUT_HEADER)
    if given is not None:
        wanted.append((TIMEOUT_HEADER, _seconds(given)))
    if not wanted:
        return gateway.limits.timeout_s
    name, timeout_s = min(wanted, key=lambda each: each[1])
    most = gateway.limits.longest_timeout_s
    if timeout_s > most:
        raise RequestError(f"{name}: {timeout_s:g} s is more than the limit of {most:g} s", param=name)
    return timeout_s


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(
            f"{TIMEOUT_HEADER}: expected a positive number of seconds",
            param=TIMEOUT_HEADER,
            code="invalid_header",
        )
    return seconds


def _check_key(key: ApiKey, generations: int) -> None:
    """A request that could never be taken whole is wrong, not early."""
    for most, what in (
        (key.limits.max_concurrent, "at once"),
        (key.limits.requests_per_minute, "in a minute"),
    ):
        if most is not None and generations > most:
            raise RequestError(
                f"n: this request makes {generations} generations, but this API key may have {most} {what}",
                param="n",
            )


class ResponseSpec(msgspec.Struct, frozen=True, kw_only=True):
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
    terms: RequestOptions


class PlannedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, of the `prompt`-th prompt from 0 on, and the choice that its tokens become."""

    generation: Generation
    choice: OutputProcessor
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


def stop_strings(fields: GenerationFields, limits: RequestLimits) -> tuple[str, ...]:
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
    gateway: Gateway, fields: GenerationFields, answer: ResponseSpec, prompts: list[list[int]]
) -> list[PlannedChoice]:
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
            choice = OutputProcessor(index, gateway.tokenizer, fields, stops)
            planned.append(PlannedChoice(generation=generation, choice=choice, prompt=number))
    return planned


def _sampling(
    gateway: Gateway, fields: GenerationFields, answer: ResponseSpec, prompt_tokens: int
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


def _generation(
    answer: ResponseSpec, index: int, token_ids: list[int], sampling: SamplingParams
) -> Generation:
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
