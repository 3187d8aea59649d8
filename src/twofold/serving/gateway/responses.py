"""Response bodies of the API. Fields are null where OpenAI sends null; UNSET fields are omitted."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

MaybeTokenIds = list[int] | UnsetType


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """`cached_tokens` of the prompts were found in a cache."""

    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts; each prompt counts once for any number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


MaybeUsage = Usage | None | UnsetType


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: MaybeTokenIds = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """A whole answer or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: MaybeUsage = UNSET


class ChatTopLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: MaybeTokenIds = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: MaybeTokenIds = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: MaybeUsage = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "twofold"
    root: str
    max_model_len: int
    vocab_size: int


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Struct, frozen=True, kw_only=True):
    status: Literal["ready", "not ready"]


class Version(Struct, frozen=True, kw_only=True):
    version: str
