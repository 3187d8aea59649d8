"""Request bodies of the API with strict types: no numbers in strings, no booleans for numbers, no NaN.

Null means the default in every optional field. Unknown fields are ignored; unsupported fields that would change the
answer are rejected unless they have a neutral value.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from twofold.errors import RequestError


def invalid(field: str, reason: str, *, status: int = 400, code: str | None = None) -> RequestError:
    """Create the error for an invalid field."""
    return RequestError(f"{field}: {reason}", param=field, status=status, code=code)


class UnsupportedFields(Struct, frozen=True, kw_only=True):
    """Known but unsupported fields, decoded to reject values that would change the answer."""

    allowed_token_ids: object = None
    audio: object = None
    bad_words: object = None
    best_of: object = None
    chat_template: object = None
    continue_final_message: object = None
    documents: object = None
    echo: object = None
    frequency_penalty: object = None
    function_call: object = None
    functions: object = None
    guided_choice: object = None
    guided_grammar: object = None
    guided_json: object = None
    guided_regex: object = None
    length_penalty: object = None
    logit_bias: object = None
    logits_processors: object = None
    min_p: object = None
    modalities: object = None
    prediction: object = None
    presence_penalty: object = None
    prompt_embeds: object = None
    prompt_logprobs: object = None
    reasoning_effort: object = None
    repetition_penalty: object = None
    response_format: object = None
    structured_outputs: object = None
    suffix: object = None
    tool_choice: object = None
    tools: object = None
    truncate_prompt_tokens: object = None
    use_beam_search: object = None
    web_search_options: object = None


# Values besides null that have no effect on the answer.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "bad_words": ([],),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),  # without functions both mean text
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}


def refuse_unsupported(fields: UnsupportedFields, n: int) -> None:
    """Raise RequestError on the first unsupported field with a value that is not neutral."""
    for name in UnsupportedFields.__struct_fields__:
        value = getattr(fields, name)
        neutral = (n,) if name == "best_of" else NEUTRAL.get(name, ())
        if value is None or any(_same(value, allowed) for allowed in neutral):
            continue
        allowed = " or ".join(["null", *(msgspec.json.encode(each).decode() for each in neutral)])
        raise invalid(
            name,
            f"not supported by this service; leave it out or send {allowed}",
            code="unsupported_parameter",
        )


def _same(value: object, allowed: object) -> bool:
    """Equality as in JSON, where false is not 0."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


MAX_INT = 2**63 - 1
Count = Annotated[int, Meta(ge=1, le=MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Seed = Annotated[int, Meta(ge=-(2**63), le=MAX_INT)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
CacheKey = Annotated[str, Meta(max_length=64)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
Ttl = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,5}[smh]$")]
Prompt = str | list[str | TokenId | list[TokenId]]


class StreamOptions(Struct, frozen=True, kw_only=True):
    """Send usage in a final chunk (`include_usage`) or in every chunk (`continuous_usage_stats`)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class PromptCacheOptions(Struct, frozen=True, kw_only=True):
    """Which part of a prompt to cache (`mode`), and the minimum retention (`ttl`, for example 30m)."""

    mode: str | None = None
    ttl: Ttl | None = None


class GenerationFields(UnsupportedFields, frozen=True, kw_only=True):
    """Fields of both endpoints, with the names and meanings of OpenAI and vLLM."""

    model: str
    max_tokens: Count | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=MAX_INT)] | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None


class CompletionFields(GenerationFields, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: Prompt
    logprobs: TopLogprobs | None = None


class ContentPart(Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class InputMessage(Struct, frozen=True, kw_only=True):
    """One chat message; clients send the last five fields when they return an assistant's message."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: object = None
    function_call: object = None
    audio: object = None
    refusal: object = None
    tool_call_id: object = None


class ChatFields(GenerationFields, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[InputMessage]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
