"""Conversion of an HTTP request to inputs of the service, one for each choice."""

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

import msgspec
from starlette.requests import Request as HttpRequest

from twofold.errors import RequestError
from twofold.request import Constraint, Generation, PromptText, Request, SamplingParams
from twofold.serving.gateway.gateway import Gateway, RequestLimits
from twofold.serving.gateway.keys import ApiKey
from twofold.serving.gateway.middleware import Arrival
from twofold.serving.gateway.output import OutputProcessor, stop_patterns
from twofold.serving.gateway.schemas import (
    PASSED,
    GenerationFields,
    check_limit,
    invalid,
    refuse_unsupported,
    unsupported,
)
from twofold.serving.gateway.structured import GivenConstraint, given_constraint
from twofold.serving.gateway.tools.families import Json
from twofold.serving.gateway.tools.message_parser import MessageParser

TIMEOUT_HEADER = "X-Request-Timeout"
# "in-memory" is OpenAI's spelling until 2026. Both spellings mean: until evicted.
RETENTIONS: Final = {"in_memory": 0.0, "in-memory": 0.0, "24h": 24 * 3600.0}
MODES: Final = ("implicit",)

PromptInput = str | bytes | list[int]  # bytes: a JSON string
CHARACTERS_PER_TOKEN: Final = 4  # a guess, of a prompt that a server tokenizes

# The gateway sets these fields itself.
_OWN_FIELDS: Final = frozenset({"kv_transfer_params", "request_id", "return_tokens_as_token_ids"})
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SEED_BITS = 63
_SEED_MASK = (1 << _SEED_BITS) - 1


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Form of a chat answer with reasoning and tool calls."""

    template: Json  # a response template of transformers
    prompt_end: str
    tools: list[Json]
    forced: bool = False  # whether a grammar forces calls
    in_parts: bool = False  # whether the arguments of a call are sent as they arrive

    def parser(self) -> MessageParser:
        return MessageParser(self.template, self.prompt_end, self.tools, forced=self.forced, in_parts=self.in_parts)


class ResponseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a response: id, request arrival, deadline, lifetime of the prompt's KV cache, constraint, LoRA
    adapter, and the request's fields that only servers behind the gateway know.

    Times are in seconds; the deadline is a time of the monotonic clock.
    """

    id: str
    arrival: Arrival
    deadline_s: float
    retain_s: float
    given: GivenConstraint | None = None
    format: AnswerFormat | None = None  # of a chat answer that may have reasoning or tool calls
    server_fields: dict[str, msgspec.Raw] = {}
    adapter: str = ""


class PlannedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a response: its input, its output processor, and the index of its prompt."""

    generation: Generation
    output: OutputProcessor
    prompt: int
    echoes: bool = False  # whether the prompt comes before the output
    outputs: bool = True  # False: only the prompt was asked for


def response_spec(gateway: Gateway, request: HttpRequest, fields: GenerationFields, *, prompts: int) -> ResponseSpec:
    """Check a request; return what its response needs: id, deadline, caching time of prompts. Raises RequestError."""
    _check_fields(gateway, fields, prompts)
    given = given_constraint(fields)
    if not gateway.service.model.returns_ids and (
        fields.return_token_ids or fields.wanted_logprobs is not None or given
    ):
        raise unsupported("model", "its servers return text alone, and take such a request as it is")
    arrival: Arrival = request.state.arrival
    if arrival.key is not None:
        _check_key(arrival.key, fields.generated * prompts)
    return ResponseSpec(
        id=f"{fields.id_prefix}-{arrival.request_id}",
        arrival=arrival,
        deadline_s=arrival.monotonic_s + _timeout_s(gateway.limits, request, fields),
        retain_s=min(_retention_s(fields), gateway.limits.longest_retention_s),
        given=given,
        adapter=fields.model if fields.model in gateway.service.model.adapters else "",
    )


def server_fields(gateway: Gateway, request: HttpRequest, fields: GenerationFields) -> dict[str, msgspec.Raw]:
    """Return the fields of a request's body that only the servers behind the gateway know, if there are servers."""
    closed = fields.__struct_config__.forbid_unknown_fields  # the body has no other fields
    if gateway.forwarder is None or (closed and all(getattr(fields, name) is None for name in PASSED)):
        return {}
    given = msgspec.json.decode(request.state.body, type=dict[str, msgspec.Raw])
    own = _known_fields(type(fields))
    return {name: value for name, value in given.items() if name not in own}


@cache
def _known_fields(kind: type[GenerationFields]) -> frozenset[str]:
    return _OWN_FIELDS.union(kind.__struct_fields__) - PASSED


def plan(
    gateway: Gateway, fields: GenerationFields, spec: ResponseSpec, prompts: Sequence[PromptInput]
) -> Iterator[PlannedChoice]:
    """Yield a generation request and an output processor for every completion, which may be several per prompt.

    Servers tokenize prompts that are no token ids. Raises RequestError if a request parameter is invalid.
    """
    n = fields.generated
    lengths = [len(each) if isinstance(each, list) else gateway.least_tokens(len(each)) for each in prompts]
    tokens, most = n * sum(lengths), gateway.limits.generated_prompt_tokens
    if tokens > most:
        raise invalid(
            "prompt" if n == 1 else "n",
            f"the prompts of all generations have {tokens} tokens, more than the limit of {most} in one request",
            code="prompt_too_long",
        )
    sampling = _sampling(gateway, fields, None if spec.given is None else spec.given.constraint)
    stops = stop_patterns(_stop_strings(fields, gateway.limits))
    for number, prompt in enumerate(prompts):
        max_tokens = _max_tokens(gateway, fields, lengths[number])
        seed = random.getrandbits(_SEED_BITS) if fields.seed is None else fields.seed
        for nth in range(n):
            index = number * n + nth
            seeded = msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=(seed + nth) & _SEED_MASK)
            generation = _generation(spec, fields, index, prompt, seeded)
            parser = None if spec.format is None else spec.format.parser()
            output = OutputProcessor(index, gateway.tokenizer, fields, stops, parser)
            outputs = fields.max_tokens != 0
            yield PlannedChoice(
                generation=generation, output=output, prompt=number, echoes=fields.echoes, outputs=outputs
            )


def _generation(
    spec: ResponseSpec, fields: GenerationFields, index: int, prompt: PromptInput, sampling: SamplingParams
) -> Generation:
    key, text = spec.arrival.key_name, None
    if not isinstance(prompt, list):
        # Special tokens may delimit reasoning and tool calls.
        skips = fields.skip_special_tokens is not False and spec.format is None
        json = msgspec.json.encode(prompt) if isinstance(prompt, str) else prompt
        text = PromptText(json=json, add_special_tokens=fields.adds_special_tokens, skip_special_tokens=skips)
    request = Request(
        # Clients may reuse request ids, so the generation's id has a random suffix.
        id=f"{spec.id}-{index}-{random.getrandbits(128):032x}",
        arrival_s=spec.arrival.monotonic_s,
        prompt_tokens=len(prompt) if text is None else 1 + len(prompt) // CHARACTERS_PER_TOKEN,
        output_tokens=sampling.max_tokens,
        retain_s=spec.retain_s,
        # Requests without a cache key belong to no session. Keys of different tenants differ.
        session=f"{key} {fields.prompt_cache_key}" if fields.prompt_cache_key else "",
        adapter=spec.adapter,
    )
    return Generation(
        request=request,
        prompt_token_ids=prompt if isinstance(prompt, list) else [],
        prompt_text=text,
        sampling=sampling,
        key=key,
        priority=fields.priority or 0,
        deadline_s=spec.deadline_s,
        cache_salt=fields.cache_salt or "",
        returns_timings=bool(fields.return_timings),
        server_fields=spec.server_fields,
    )


def _sampling(gateway: Gateway, fields: GenerationFields, constraint: Constraint | None) -> SamplingParams:
    """Return the sampling parameters of all completions, without their limits and seeds."""
    vocab_size, stop_token_ids = gateway.service.model.vocab_size, tuple(fields.stop_token_ids or ())
    check_limit("stop_token_ids", len(stop_token_ids), gateway.limits.stop_token_ids, "token ids")
    if max(stop_token_ids, default=0) >= vocab_size:
        raise invalid("stop_token_ids", f"{max(stop_token_ids)} is not in the vocabulary of {vocab_size} tokens")
    bad_words = _bad_words(fields, gateway.limits)
    return SamplingParams(
        max_tokens=0,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=fields.repetition_penalty or 1.0,
        logit_bias=_logit_bias(fields, gateway),
        bad_words=bad_words,
        bad_word_ids=gateway.require_tokenizer("bad_words").spellings(bad_words) if bad_words else (),
        # A top_k above the vocabulary size keeps all tokens.
        top_k=min(max(fields.top_k or 0, 0), vocab_size),
        min_tokens=fields.min_tokens or 0,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=stop_token_ids,
        logprobs=0 if fields.wanted_logprobs is None and fields.best_of else fields.wanted_logprobs,
        prompt_logprobs=fields.wanted_logprobs if fields.echoes else None,
        constraint=constraint,
    )


def _max_tokens(gateway: Gateway, fields: GenerationFields, prompt_tokens: int) -> int:
    """Return the most output tokens after a prompt. Raises RequestError if they do not fit."""
    model, min_tokens = gateway.service.model, fields.min_tokens or 0
    left = model.max_model_len - prompt_tokens
    max_tokens = fields.token_limit or max(1, min(fields.default_max_tokens, left))
    if prompt_tokens + max_tokens > model.max_model_len:
        raise RequestError(
            f"the context length of this model is {model.max_model_len} tokens, but {prompt_tokens} tokens "
            f"of prompt and {max_tokens} of output make {prompt_tokens + max_tokens}; shorten one of them",
            param="max_tokens" if prompt_tokens < model.max_model_len else None,
            code="context_length_exceeded",
        )
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"{min_tokens} is more than the {max_tokens} tokens that may be generated")
    return max_tokens


def _logit_bias(fields: GenerationFields, gateway: Gateway) -> tuple[tuple[int, float], ...]:
    bias, vocabulary = fields.logit_bias or {}, gateway.service.model.vocab_size
    check_limit("logit_bias", len(bias), gateway.limits.biased_tokens, "tokens")
    digits = len(str(vocabulary))  # Python converts no number of thousands of digits
    wrong = next(
        (token for token in bias if not (token.isdecimal() and len(token) <= digits and int(token) < vocabulary)), None
    )
    if wrong is not None:
        raise invalid("logit_bias", f"{wrong[:40]!r} is no token id of the vocabulary of {vocabulary} tokens")
    return tuple((int(token), added) for token, added in bias.items())


def _bad_words(fields: GenerationFields, limits: RequestLimits) -> tuple[str, ...]:
    words = tuple(fields.bad_words or ())
    check_limit("bad_words", len(words), limits.bad_words, "words")
    if not all(map(str.strip, words)):
        raise invalid("bad_words", "a word is empty")
    check_limit("bad_words", sum(map(len, words)), limits.bad_word_characters, "characters")
    return words


def _check_fields(gateway: Gateway, fields: GenerationFields, prompts: int) -> None:
    gateway.check_model(fields.model)
    n, limits = fields.generated, gateway.limits
    refuse_unsupported(fields, PASSED if gateway.forwarder is not None else frozenset())
    if fields.best_of is not None and fields.best_of < (fields.n or 1):
        raise invalid("best_of", f"{fields.best_of} is less than n {fields.n}")
    if fields.stream and n > (fields.n or 1):
        raise invalid("best_of", "the best answers are known at the end only: send stream: false")
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "requires stream: true")
    if fields.max_tokens == 0 and not fields.echoes:
        raise invalid("max_tokens", "0 requires echo: true")
    scores_prompts = gateway.constrains and gateway.grammars is not None  # neither emulated engines nor servers do
    if fields.echoes and fields.wanted_logprobs is not None and not scores_prompts:
        raise unsupported("echo", "this service cannot return log probabilities of a prompt")
    if n > limits.choices:
        raise invalid("n" if fields.n == n else "best_of", f"{n} is more than the limit of {limits.choices}")
    if n * prompts > limits.generations:
        raise invalid(
            "n",
            f"{prompts} prompts with n {n} make {n * prompts} generations, more than the limit of "
            f"{limits.generations} in one request",
        )
    stops = len(_stop_strings(fields, limits))
    if stops:
        gateway.require_tokenizer("stop")
    if stops * n * prompts > limits.stop_searches:
        raise invalid(
            "stop",
            f"{stops} stop strings in {n * prompts} generations exceed the limit of {limits.stop_searches} in all",
        )


def _stop_strings(fields: GenerationFields, limits: RequestLimits) -> list[str]:
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    check_limit("stop", len(stops), limits.stop_strings, "stop strings")
    if "" in stops:
        raise invalid("stop", "a stop string is empty")
    if any(len(stop) > limits.stop_characters for stop in stops):
        raise invalid("stop", f"a stop string is longer than the limit of {limits.stop_characters} characters")
    return stops


def _check_key(key: ApiKey, generations: int) -> None:
    for most, what in ((key.limits.max_concurrent, "at once"), (key.limits.requests_per_minute, "per minute")):
        if most is not None and generations > most:
            raise invalid("n", f"{generations} generations exceed this API key's limit of {most} {what}")


def _timeout_s(limits: RequestLimits, request: HttpRequest, fields: GenerationFields) -> float:
    """Return the timeout of a request in seconds. Raises RequestError for a timeout above the limit."""
    wanted = [] if fields.timeout is None else [(fields.timeout, "timeout")]
    header = request.headers.get(TIMEOUT_HEADER)
    if header is not None:
        wanted.append((_header_seconds(header), TIMEOUT_HEADER))
    if not wanted:
        return limits.timeout_s
    # The shorter of body field and header.
    timeout_s, name = min(wanted, key=lambda each: each[0])
    if timeout_s > limits.longest_timeout_s:
        raise invalid(name, f"{timeout_s:g} s is more than the limit of {limits.longest_timeout_s:g} s")
    return timeout_s


def _header_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise invalid(TIMEOUT_HEADER, "expected a positive number of seconds", code="invalid_header")
    return seconds


def _retention_s(fields: GenerationFields) -> float:
    """Return the requested cache retention of a prompt in seconds; 0 if the request sets none."""
    retention, options = fields.prompt_cache_retention, fields.prompt_cache_options
    if retention is not None and retention not in RETENTIONS:
        raise invalid("prompt_cache_retention", f"must be in_memory or 24h, not {retention!r}", code="invalid_value")
    retention_s = 0.0 if retention is None else RETENTIONS[retention]
    if options is None:
        return retention_s
    if options.mode is not None and options.mode not in MODES:
        raise invalid(
            "prompt_cache_options.mode",
            "not supported by this service, which caches every full block of a prompt; leave it out or send implicit",
            code="unsupported_parameter",
        )
    if options.ttl is None:
        return retention_s
    ttl = options.ttl.strip()  # the pattern allows a trailing newline
    return max(retention_s, int(ttl[:-1]) * _UNITS[ttl[-1]])
