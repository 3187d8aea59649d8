"""The endpoint `POST /v1/chat/completions`."""

from collections.abc import Sequence

from fastapi.responses import Response
from msgspec import UNSET
from starlette.requests import Request

from twofold.serving.gateway import responses
from twofold.serving.gateway.gateway import Gateway, read_struct
from twofold.serving.gateway.generations import ResponseSpec, response_spec
from twofold.serving.gateway.output import Delta, LogprobFormat
from twofold.serving.gateway.schemas import ChatFields, ContentPart, InputMessage, invalid
from twofold.serving.gateway.streaming import event, respond

# OpenAI renamed the system role to developer; most templates support the old name only.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
UNSUPPORTED_PARTS = ("tool_calls", "function_call", "audio", "refusal", "tool_call_id")


async def chat(gateway: Gateway, request: Request) -> Response:
    """Answer `POST /v1/chat/completions`. Raises RequestError, InstanceLostError and ClientDisconnect."""
    fields = await read_struct(request, ChatFields, gateway.limits.body_bytes)
    spec = response_spec(gateway, request, fields, prompts=1)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs", "requires logprobs: true")
    token_ids = await encode_messages(gateway, fields)
    writer = ChatWriter(spec, fields, LogprobFormat(gateway.tokenizer))
    return await respond(gateway, request, fields, spec, [token_ids], writer)


async def encode_messages(gateway: Gateway, fields: ChatFields) -> list[int]:
    """Return the token ids of chat messages in the model's chat template. Raises RequestError."""
    tokenizer = gateway.require_tokenizer("messages")
    messages = template_messages(fields.messages)
    gateway.check_length(sum(len(message["content"]) for message in messages), "messages")
    token_ids = await tokenizer.encode_chat(
        messages,
        add_generation_prompt=fields.add_generation_prompt is not False,
        add_special_tokens=bool(fields.add_special_tokens),
        template_kwargs=fields.chat_template_kwargs or {},
    )
    if not token_ids:
        raise invalid("messages", "the model's chat template renders an empty prompt")
    gateway.check_tokens(len(token_ids), "messages")
    return token_ids


def template_messages(messages: Sequence[InputMessage]) -> list[dict[str, str]]:
    """Convert messages to the input of a chat template. Raises RequestError for unknown roles and non-text content."""
    if not messages:
        raise invalid("messages", "the list is empty; send at least one message")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: InputMessage, place: str) -> dict[str, str]:
    if message.role not in ROLES:
        raise invalid(f"{place}.role", f"{message.role!r} is not supported; use one of {', '.join(ROLES)}")
    for field in UNSUPPORTED_PARTS:
        if getattr(message, field) not in (None, [], {}):
            raise invalid(f"{place}.{field}", "not supported by this service")
    rendered = {"role": ROLES[message.role], "content": _text(message.content, f"{place}.content")}
    return rendered if message.name is None else {**rendered, "name": message.name}


def _text(content: str | list[ContentPart] | None, place: str) -> str:
    if content is None:
        raise invalid(place, "it is missing; send a string or a list of text parts")
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part_text(part: ContentPart, place: str) -> str:
    if part.type != "text":
        raise invalid(f"{place}.type", f"{part.type!r} is not supported; this service takes text only")
    if part.text is None:
        raise invalid(f"{place}.text", "this field is required")
    return part.text


class ChatWriter:
    """Formats the response bodies and stream events of chat completions."""

    def __init__(self, spec: ResponseSpec, fields: ChatFields, logprobs: LogprobFormat) -> None:
        self._spec, self._fields, self._logprobs = spec, fields, logprobs

    def events(self, delta: Delta, usage: responses.MaybeUsage) -> bytes:
        data = event(self._chunk([self._chunk_choice(delta)], usage))
        if delta.token.index > 0:
            return data
        # The first chunk of a choice sets the role.
        opening = responses.ChatDelta(role="assistant", content="")
        role = responses.ChatChunkChoice(index=delta.choice, delta=opening, logprobs=None, finish_reason=None)
        return event(self._chunk([role], usage)) + data

    def usage_event(self, usage: responses.Usage) -> bytes:
        return event(self._chunk([], usage))

    def response(self, choices: Sequence[Sequence[Delta]], usage: responses.Usage) -> responses.ChatCompletion:
        return responses.ChatCompletion(
            id=self._spec.id,
            created=self._spec.arrival.created,
            model=self._fields.model,
            choices=[self._choice(deltas) for deltas in choices],
            usage=usage,
        )

    def _chunk(self, choices: list[responses.ChatChunkChoice], usage: responses.MaybeUsage) -> responses.ChatChunk:
        id_, created = self._spec.id, self._spec.arrival.created
        return responses.ChatChunk(id=id_, created=created, model=self._fields.model, choices=choices, usage=usage)

    def _choice(self, deltas: Sequence[Delta]) -> responses.ChatChoice:
        return responses.ChatChoice(
            index=deltas[0].choice,
            message=responses.ChatMessage(content="".join(delta.text for delta in deltas)),
            logprobs=self._logprobs_of(deltas),
            finish_reason=deltas[-1].finish_reason,
            token_ids=self._token_ids_of(deltas),
        )

    def _chunk_choice(self, delta: Delta) -> responses.ChatChunkChoice:
        return responses.ChatChunkChoice(
            index=delta.choice,
            delta=responses.ChatDelta(content=delta.text),
            logprobs=self._logprobs_of((delta,)),
            finish_reason=delta.finish_reason,
            token_ids=self._token_ids_of((delta,)),
        )

    def _logprobs_of(self, deltas: Sequence[Delta]) -> responses.ChatLogprobs | None:
        top = self._fields.wanted_logprobs
        return None if top is None else self._logprobs.chat(deltas, top)

    def _token_ids_of(self, deltas: Sequence[Delta]) -> responses.MaybeTokenIds:
        return [delta.token.token_id for delta in deltas] if self._fields.return_token_ids else UNSET
