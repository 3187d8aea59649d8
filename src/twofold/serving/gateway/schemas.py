"""The request bodies of the API, typed strictly: no number in a string, no boolean for a number, no NaN.

Null means the default everywhere but in the required fields. Fields that are named nowhere here are ignored;
`unsupported.py` refuses the ones whose meaning would be lost by that.
"""

from typing import Annotated

from msgspec import Meta, Struct

from twofold.serving.gateway.unsupported import UnsupportedFields

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
    """Usage in a last chunk of its own (`include_usage`) or in every chunk (`continuous_usage_stats`)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class PromptCacheOptions(Struct, frozen=True, kw_only=True):
    """What of a prompt is to be kept (`mode`), and for how long at least (`ttl`: 30m, say)."""

    mode: str | None = None
    ttl: Ttl | None = None


class GenerationFields(UnsupportedFields, frozen=True, kw_only=True):
    """What both endpoints take; names and meanings are OpenAI's and vLLM's."""

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
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    logprobs: TopLogprobs | None = None


class ContentPart(Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class Message(Struct, frozen=True, kw_only=True):
    """One chat message; the last five fields come from clients that send an assistant's message back."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: object = None
    function_call: object = None
    audio: object = None
    refusal: object = None
    tool_call_id: object = None


class ChatFields(GenerationFields, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
