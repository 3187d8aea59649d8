"""Response bodies of the API, and conversion of exceptions to error responses, in OpenAI's JSON format."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal

import msgspec
from fastapi.responses import Response
from msgspec import UNSET, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request

from twofold.errors import InstanceLostError, RequestError
from twofold.request import RequestTimings

logger = logging.getLogger(__name__)

# Default Retry-After in seconds; short, because another instance may be free already.
RETRY_AFTER_S = "1"

MaybeTokenIds = list[int] | UnsetType


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """Number of prompt tokens that were found in a prefix cache."""

    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of a response. Each prompt counts once, even if it has several choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    timings: list[RequestTimings] | UnsetType = UNSET  # by choice, with `return_timings`


MaybeUsage = Usage | None | UnsetType


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: MaybeTokenIds = UNSET
    prompt_token_ids: MaybeTokenIds = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """A complete text completion, or one chunk of a streamed completion."""

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


class ChatTokenLogprob(ChatTopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatFunction(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET  # only in the first part of a call
    arguments: str


class ChatToolCall(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: ChatFunction


class ChatToolCallDelta(Struct, frozen=True, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: ChatFunction


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


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
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET


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
    parent: str | None = None  # of a LoRA adapter
    max_model_len: int
    vocab_size: int


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(Struct, frozen=True, kw_only=True):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True, kw_only=True):
    """Answer of `POST /detokenize`."""

    prompt: str


class Health(Struct, frozen=True, kw_only=True):
    status: Literal["ready", "not ready"]


class Version(Struct, frozen=True, kw_only=True):
    version: str


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """Value of the field `error` in an error response."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True, kw_only=True):
    error: ErrorDetail


def error_response_for(error: Exception) -> Response:
    """Convert an exception to an error response. Unexpected exceptions are logged and become status 500."""
    if isinstance(error, RequestError):
        return error_response(
            error.status, str(error), param=error.param, code=error.code, retry_after_s=error.retry_after_s
        )
    if isinstance(error, InstanceLostError):
        return error_response(503, str(error) or "the instance that ran the request was lost", code="instance_lost")
    if isinstance(error, RecursionError):  # in a template or an encoder: the decoder allows almost a thousand levels
        return error_response(400, "the request is nested too deeply", code="nested_too_deeply")
    logger.error("unexpected error while answering a request", exc_info=error)
    return error_response(500, "unexpected error; see the server's log", code="internal_error")


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")


def error_response(
    status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
) -> Response:
    headers = {}
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    elif status in (429, 503):
        headers["Retry-After"] = RETRY_AFTER_S
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    detail = ErrorDetail(message=message, type=_type_of(status), param=param, code=code)
    return json_response(ErrorBody(error=detail), status, headers)


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


async def answer_error(_request: Request, error: Exception) -> Response:
    """Exception handler for TwofoldError: return the error response."""
    return error_response_for(error)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Exception handler for unknown paths and wrong methods: return the error response."""
    if not isinstance(error, HTTPException):
        raise TypeError(f"expected an HTTPException, got {type(error).__name__}")
    reason = HTTPStatus(error.status_code).phrase
    code = reason.lower().replace(" ", "_")
    answer = error_response(error.status_code, f"{request.method} {request.url.path}: {reason}", code=code)
    answer.headers.update(error.headers or {})
    return answer
