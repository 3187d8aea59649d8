"""From request fields to the generations of one HTTP request."""

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

# "in-memory" is OpenAI's spelling until 2026. Both spellings mean: until evicted.
RETENTIONS: Final = {"in_memory": 0.0, "in-memory": 0.0, "24h": 24 * 3600.0}
MODES: Final = ("implicit",)

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


def retention_s(fields: GenerationFields, longest_s: float) -> float:
    """Seconds to keep the prompt cached, at most `longest_s`; 0 without a request for it.

    The longer of `prompt_cache_retention` and `prompt_cache_options.ttl` applies. Raises RequestError.
    """
    wanted_s = 0.0
    if fields.prompt_cache_retention is not None:
        if fields.prompt_cache_retention not in RETENTIONS:
            raise RequestError(
                f"prompt_cache_retention: must be in_memory or 24h, not {fields.prompt_cache_retention!r}",
                param="prompt_cache_retention",
                code="invalid_value",
            )
        wanted_s = RETENTIONS[fields.prompt_cache_retention]
    options = fields.prompt_cache_options
    if options is not None:
        if options.mode is not None and options.mode not in MODES:
            raise RequestError(
                "prompt_cache_options.mode: not supported by this service, which caches every full block of a prompt; "
                "leave it out or send implicit",
                param="prompt_cache_options.mode",
                code="unsupported_parameter",
            )
        if options.ttl is not None:
            ttl = options.ttl.strip()  # the pattern allows a trailing newline
            wanted_s = max(wanted_s, int(ttl[:-1]) * _UNITS[ttl[-1]])
    return min(wanted_s, longest_s)


SEED_BITS = 63
_SEED_MASK = (1 << SEED_BITS) - 1


def sampling_of(
    fields: GenerationFields, model: ServedModel, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Build the sampling parameters; raises RequestError for values that conflict with the model or other fields."""
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
        # A top_k above the vocabulary size keeps all tokens.
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
    """Seed of a prompt's choice 0: the user's, or a random one."""
    return secrets.randbits(SEED_BITS) if seed is None else seed & _SEED_MASK


def choice_seed(base: int, choice: int) -> int:
    """Seed of a prompt's choice `choice`, reduced to 63 bits."""
    return (base + choice) & _SEED_MASK


TIMEOUT_HEADER = "X-Request-Timeout"


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduling options of a request.

    `key` is the API key's name (empty: none), `priority` is vLLM's, and `deadline_s` is on the monotonic clock. The
    prompt stays cached for `retain_s` seconds and is shared with requests of the same `cache_salt` only.
    """

    key: str
    priority: int
    deadline_s: float
    retain_s: float
    cache_salt: str


def request_options(
    gateway: Gateway, request: HttpRequest, fields: GenerationFields, prompts: int
) -> RequestOptions:
    """Read the options; raises RequestError for invalid timeouts and retentions, and beyond the key's limits."""
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
    """The shorter of the field and the header, or the default timeout."""
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
    """Reject a request that exceeds the key's limits even on its own."""
    for most, what in (
        (key.limits.max_concurrent, "at once"),
        (key.limits.requests_per_minute, "per minute"),
    ):
        if most is not None and generations > most:
            raise RequestError(
                f"n: {generations} generations exceed this API key's limit of {most} {what}",
                param="n",
            )


class ResponseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a response and options of its generations.

    `created` is in unix seconds and `arrival_s` on the monotonic clock. `max_tokens` None means the rest of the
    context; `capped_tokens` is a default that shrinks to the context.
    """

    id: str
    created: int
    arrival_s: float
    max_tokens: int | None
    capped_tokens: int | None = None
    logprobs: int | None = None
    terms: RequestOptions


class PlannedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A generation for prompt number `prompt`, and the processor of its output."""

    generation: Generation
    choice: OutputProcessor
    prompt: int


def check_fields(gateway: Gateway, fields: GenerationFields, prompts: int) -> None:
    """Raise RequestError on fields that are invalid independent of the tokenized prompts."""
    gateway.check_model(fields.model)
    n, limits = fields.n or 1, gateway.limits
    refuse_unsupported(fields, n)
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options: requires stream: true", param="stream_options")
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
    """Create `n` generations per prompt, ordered by prompt.

    Choice i of every prompt is sampled with seed + i, so a prompt gives the same choices alone and in a list.
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
        # Clients may reuse request ids, so the generation's id has a random suffix.
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
    """Stream options, or None for an answer without streaming."""
    return (fields.stream_options or StreamOptions()) if fields.stream else None
