"""Request bodies of the API. Types are checked strictly: a number in a string is an error.

Null selects the default, and unknown fields are ignored. Known but unsupported fields, such as `suffix`, are
accepted only with values that do not affect the answer.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from twofold.errors import RequestError, UnsupportedError


def invalid(field: str, reason: str, *, status: int = 400, code: str | None = None) -> RequestError:
    """Return a RequestError that names `field` as invalid because of `reason`."""
    return RequestError(f"{field}: {reason}", param=field, status=status, code=code)


def unsupported(field: str, reason: str, *, code: str = "unsupported_parameter") -> UnsupportedError:
    """Return an UnsupportedError that names `field` because of `reason`."""
    return UnsupportedError(f"{field}: {reason}", param=field, code=code)


def check_limit(field: str, count: int, most: int | None, what: str, *, code: str | None = None) -> None:
    """Raise RequestError if a field has more than `most` of `what` (None: no limit)."""
    if most is not None and count > most:
        raise invalid(field, f"{count} {what} are more than the limit of {most}", code=code)


def check_served(name: str, served: str) -> None:
    """Raise RequestError (404) unless a request names the served model."""
    if name != served:
        raise invalid("model", f"{name!r} is not served here; use {served!r}", status=404, code="model_not_found")


# Unsupported fields, with the values besides null that have no effect on the answer. They are decoded to reject others.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("allowed_token_ids", "audio", "chat_template", "prediction", "prompt_embeds"), ()),
    **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens", "web_search_options"), ()),
    **dict.fromkeys(("documents", "functions", "logits_processors", "tools"), ([],)),
    **dict.fromkeys(("continue_final_message", "use_beam_search"), (False,)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),  # without functions both mean text
    "length_penalty": (1,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "suffix": ("",),
}

# Unsupported fields that servers behind the gateway apply to each token, so that the gateway can pass them on.
PASSED = frozenset({"allowed_token_ids"})

if TYPE_CHECKING:
    UnsupportedFields = Struct
else:
    UnsupportedFields = msgspec.defstruct(
        "UnsupportedFields", [(name, object, None) for name in UNSUPPORTED], frozen=True, kw_only=True
    )


def refuse_unsupported(fields: "GenerationFields", passed: frozenset[str]) -> None:
    """Raise UnsupportedError if an unsupported field, not in `passed`, has a value that would affect the answer."""
    refuse_values(fields, _refused(type(fields), passed))


@cache
def _refused(kind: "type[GenerationFields]", passed: frozenset[str]) -> dict[str, tuple[object, ...]]:
    return {name: UNSUPPORTED[name] for name in UNSUPPORTED.keys() - kind.supported - passed}


def refuse_values(fields: Struct, neutral: Mapping[str, Sequence[object]]) -> None:
    """Raise UnsupportedError if a field has another value than null and its neutral values."""
    for name, neutral_values in neutral.items():
        value = getattr(fields, name)
        if value is None or any(_same(value, allowed) for allowed in neutral_values):
            continue
        allowed = " or ".join(["null", *(msgspec.json.encode(each).decode() for each in neutral_values)])
        raise unsupported(name, f"not supported by this service; leave it out or send {allowed}")


def _same(value: object, allowed: object) -> bool:
    # In Python, False == 0.
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


MAX_INT = 2**63 - 1
Count = Annotated[int, Meta(ge=1, le=MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Seed = Annotated[int, Meta(ge=-(2**63), le=MAX_INT)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
CacheKey = Annotated[str, Meta(max_length=64)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Ttl = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,5}[smh]$")]
Prompt = str | list[str | TokenId | list[TokenId]]


class StreamOptions(Struct, frozen=True, kw_only=True):
    """Options of a stream: usage in a final chunk (`include_usage`) or in every chunk (`continuous_usage_stats`)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class PromptCacheOptions(Struct, frozen=True, kw_only=True):
    """Options of prompt caching. `ttl` is the minimum time in the cache, such as 30m."""

    mode: str | None = None
    ttl: Ttl | None = None


class JsonSchemaFormat(Struct, frozen=True, kw_only=True):
    """A JSON schema for the output. `strict` has no effect, because outputs always match."""

    schema: dict[str, object] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """OpenAI's constraint on the output."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's constraints on the output, of which one may be given."""

    json: str | dict[str, object] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: object = None  # not supported


class GenerationFields(UnsupportedFields, frozen=True, kw_only=True):
    """Request fields that text and chat completions share, with the names and meanings of OpenAI and vLLM."""

    id_prefix: ClassVar[str]
    supported: ClassVar[frozenset[str]] = frozenset()  # fields of UNSUPPORTED that this endpoint supports
    default_max_tokens: ClassVar[int] = MAX_INT

    model: str
    max_tokens: Count | None = None
    n: Count | None = None
    best_of: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Bias] | None = None  # by token id
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, object] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_timings: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=MAX_INT)] | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None

    @property
    def token_limit(self) -> int | None:
        """Maximum number of output tokens; None if the request sets no limit."""
        return self.max_tokens

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds special tokens to the prompt."""
        return self.add_special_tokens is not False

    @property
    def generated(self) -> int:
        """Number of completions to generate for each prompt, of which the best `n` are returned."""
        return max(self.n or 1, self.best_of or 1)

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of top log probabilities to return for each output token; None for no log probabilities."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False


class CompletionFields(GenerationFields, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`."""

    id_prefix = "cmpl"
    default_max_tokens = 16
    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None  # 0 with `echo` alone
    logprobs: TopLogprobs | None = None
    echo: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return 1 if self.max_tokens == 0 else self.max_tokens

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class ContentPart(Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class CalledFunction(Struct, frozen=True, kw_only=True):
    name: str
    arguments: str = "{}"  # JSON


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call in an assistant's message."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class InputMessage(Struct, frozen=True, kw_only=True):
    """One chat message of a request. Audio and refusals are accepted only if empty."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: object = None
    audio: object = None
    refusal: object = None


def joined(role: str, texts: list[str], thoughts: list[str], calls: list[ToolCall]) -> Iterator[InputMessage]:
    """Yield a message with these texts, this reasoning and these tool calls, or none if there are none of them."""
    if texts or thoughts or calls:
        yield InputMessage(
            role=role, content="\n".join(texts), tool_calls=calls or None, reasoning_content="\n".join(thoughts) or None
        )


def text_of(content: str | Sequence[ContentPart] | None, place: str, types: Collection[str] = ("text",)) -> str:
    """Return the text of a message's content, whose parts must have one of `types`. Raises RequestError."""
    if content is None:
        raise invalid(place, "it is missing; send a string or a list of text parts")
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type not in types:
            raise unsupported(
                f"{place}[{number}].type", f"{part.type!r} is not supported; this service takes text only"
            )
        if part.text is None:
            raise invalid(f"{place}[{number}].text", "this field is required")
    return "\n".join(part.text or "" for part in content)


class ToolFunction(Struct, frozen=True, kw_only=True):
    """A function that a model may call. `strict` has no effect: the arguments of forced calls always match."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, object] | None = None  # JSON schema
    strict: bool | None = None


class FunctionTool(Struct, frozen=True, kw_only=True):
    function: ToolFunction
    type: str = "function"


class ChosenFunction(Struct, frozen=True, kw_only=True):
    name: str


class NamedTool(Struct, frozen=True, kw_only=True):
    """Choice of the function that a model must call."""

    function: ChosenFunction
    type: str = "function"


class ChatFields(GenerationFields, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    id_prefix = "chatcmpl"
    supported = frozenset({"tools", "tool_choice", "reasoning_effort"})
    messages: list[InputMessage]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def adds_special_tokens(self) -> bool:
        return bool(self.add_special_tokens)  # a chat template has its own

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeFields(Struct, frozen=True, kw_only=True):
    """Body of `POST /tokenize`: a text, or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[InputMessage] | None = None
    tools: list[FunctionTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Struct, frozen=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None
