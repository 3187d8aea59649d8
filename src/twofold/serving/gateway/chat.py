"""`POST /v1/chat/completions`."""

from collections.abc import Sequence

import msgspec
from fastapi.responses import Response
from msgspec import UNSET
from starlette.requests import Request

from twofold.errors import RequestError
from twofold.serving.gateway.completions import check_length, check_tokens
from twofold.serving.gateway.gateway import Gateway, read_struct
from twofold.serving.gateway.generations import (
    ResponseSpec,
    check_fields,
    plan,
    request_options,
    stream_options,
)
from twofold.serving.gateway.middleware import arrival_of
from twofold.serving.gateway.output import Delta, LogprobFormat
from twofold.serving.gateway.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    MaybeTokenIds,
    MaybeUsage,
    Usage,
)
from twofold.serving.gateway.schemas import ChatFields, ContentPart, InputMessage
from twofold.serving.gateway.streaming import event, respond

# OpenAI renamed the system role to developer; most templates support the old name only.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
UNSUPPORTED_PARTS = ("tool_calls", "function_call", "audio", "refusal", "tool_call_id")


def template_messages(messages: Sequence[InputMessage]) -> list[dict[str, str]]:
    """Convert messages for the chat template; raises RequestError unless they are text in a role of `ROLES`."""
    if not messages:
        raise RequestError("messages: the list is empty; send at least one message", param="messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: InputMessage, place: str) -> dict[str, str]:
    if message.role not in ROLES:
        raise RequestError(
            f"{place}.role: {message.role!r} is not supported; use one of {', '.join(ROLES)}",
            param=f"{place}.role",
        )
    for field in UNSUPPORTED_PARTS:
        if getattr(message, field) not in (None, [], {}):
            raise RequestError(f"{place}.{field}: not supported by this service", param=f"{place}.{field}")
    rendered = {"role": ROLES[message.role], "content": _text(message.content, f"{place}.content")}
    return rendered if message.name is None else {**rendered, "name": message.name}


def _text(content: str | list[ContentPart] | None, place: str) -> str:
    """Text of a message; several parts are joined by newlines, as in vLLM."""
    if content is None:
        raise RequestError(f"{place}: it is missing; send a string or a list of text parts", param=place)
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part_text(part: ContentPart, place: str) -> str:
    if part.type != "text":
        raise RequestError(
            f"{place}.type: {part.type!r} is not supported; this service takes text only",
            param=f"{place}.type",
        )
    if part.text is None:
        raise RequestError(f"{place}.text: this field is required", param=f"{place}.text")
    return part.text


async def chat(gateway: Gateway, request: Request) -> Response:
    """Handle one request; raises RequestError, InstanceLostError and ClientDisconnect."""
    fields = await read_struct(request, ChatFields, gateway.limits.body_bytes)
    check_fields(gateway, fields, prompts=1)
    arrival = arrival_of(request)
    answer = ResponseSpec(
        id=f"chatcmpl-{arrival.request_id}",
        created=arrival.created,
        arrival_s=arrival.monotonic_s,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        logprobs=wanted_logprobs(fields),
        terms=request_options(gateway, request, fields, prompts=1),
    )
    prompt = await encode_messages(gateway, fields)
    planned = plan(gateway, fields, answer, [prompt])
    form = ChatWriter(answer, fields, gateway.logprob_format())
    options = stream_options(fields)
    return await respond(gateway.service, request, planned, form, prompt_tokens=len(prompt), options=options)


def wanted_logprobs(fields: ChatFields) -> int | None:
    """Number of requested alternatives; None without log probabilities."""
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs is not None:
        raise RequestError("top_logprobs: requires logprobs: true", param="top_logprobs")
    return None


async def encode_messages(gateway: Gateway, fields: ChatFields) -> list[int]:
    """Token ids of the prompt. Special tokens come from the template unless requested."""
    tokenizer = gateway.require_tokenizer("messages")
    messages = template_messages(fields.messages)
    check_length(gateway, sum(len(message["content"]) for message in messages), "messages")
    token_ids = await tokenizer.encode_chat(
        messages,
        add_generation_prompt=fields.add_generation_prompt is not False,
        add_special_tokens=bool(fields.add_special_tokens),
        template_kwargs=fields.chat_template_kwargs or {},
    )
    if not token_ids:
        raise RequestError("messages: the model's chat template renders an empty prompt", param="messages")
    check_tokens(gateway, len(token_ids), "messages")
    return token_ids


class ChatWriter:
    """Formats chat completions."""

    def __init__(self, answer: ResponseSpec, fields: ChatFields, logprobs: LogprobFormat) -> None:
        self._answer = answer
        self._fields = fields
        self._logprobs = logprobs
        self._encode = msgspec.json.Encoder().encode

    def events(self, delta: Delta, usage: MaybeUsage) -> bytes:
        data = event(self._encode(self._chunk([self._chunk_choice(delta)], usage)))
        if delta.token.index > 0:
            return data
        # The first chunk of a choice sets the role.
        role = ChatChunkChoice(
            index=delta.choice,
            delta=ChatDelta(role="assistant", content=""),
            logprobs=None,
            finish_reason=None,
        )
        return event(self._encode(self._chunk([role], usage))) + data

    def usage_event(self, usage: Usage) -> bytes:
        return event(self._encode(self._chunk([], usage)))

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self._answer.id,
            created=self._answer.created,
            model=self._fields.model,
            choices=[self._choice(deltas) for deltas in choices],
            usage=usage,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: MaybeUsage) -> ChatChunk:
        return ChatChunk(
            id=self._answer.id,
            created=self._answer.created,
            model=self._fields.model,
            choices=choices,
            usage=usage,
        )

    def _choice(self, deltas: Sequence[Delta]) -> ChatChoice:
        return ChatChoice(
            index=deltas[0].choice,
            message=ChatMessage(content="".join(delta.text for delta in deltas)),
            logprobs=self._logprobs_of(deltas),
            finish_reason=deltas[-1].finish_reason,
            token_ids=self._token_ids_of(deltas),
        )

    def _chunk_choice(self, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.choice,
            delta=ChatDelta(content=delta.text),
            logprobs=self._logprobs_of((delta,)),
            finish_reason=delta.finish_reason,
            token_ids=self._token_ids_of((delta,)),
        )

    def _logprobs_of(self, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        return None if self._answer.logprobs is None else self._logprobs.chat(deltas, self._answer.logprobs)

    def _token_ids_of(self, deltas: Sequence[Delta]) -> MaybeTokenIds:
        return [delta.token.token_id for delta in deltas] if self._fields.return_token_ids else UNSET
