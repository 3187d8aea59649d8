"""The endpoints `POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's Messages API over a chat."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi.responses import Response
from msgspec import Meta, Struct
from starlette.requests import Request

from twofold.errors import TwofoldError, UnsupportedError
from twofold.request import FinishReason
from twofold.serving.gateway import schemas
from twofold.serving.gateway.endpoints.chat import encode_messages, start_chat
from twofold.serving.gateway.gateway import Gateway, read_struct
from twofold.serving.gateway.output import Delta
from twofold.serving.gateway.responses import MaybeUsage, Usage, error_response_for, json_response
from twofold.serving.gateway.schemas import invalid, joined, text_of, unsupported
from twofold.serving.gateway.streaming import ResponseWriter, named_event, respond
from twofold.serving.gateway.tools.families import Json
from twofold.serving.gateway.tools.forced_calls import offered_tools, template_tools
from twofold.serving.gateway.tools.message_parser import CallDelta

_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_ERRORS |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


class MessageBlock(schemas.ContentPart, frozen=True, kw_only=True):
    """Part of a message: a text, a tool call, its result, or reasoning. Images and documents are refused."""

    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: "str | list[MessageBlock] | None" = None
    thinking: str | None = None


class AnthropicMessage(Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[MessageBlock]


class AnthropicTool(Struct, frozen=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    input_schema: dict[str, object] | None = None
    type: str | None = None


class AnthropicChoice(Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class CountFields(Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[MessageBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None


class MessagesFields(CountFields, frozen=True, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: schemas.Count
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=schemas.MAX_INT)] | None = None
    stop_sequences: list[str] | None = None


async def create_message(gateway: Gateway, request: Request) -> Response:
    """Answer `POST /v1/messages`. Raises ClientDisconnect."""
    try:
        fields = await read_struct(request, MessagesFields, gateway.bodies)
        gateway.check_chat([each.content for each in fields.messages], fields.tools, "messages")
        chat = chat_fields(fields)
        spec, prompt = await start_chat(gateway, request, chat)
        writer = MessagesWriter(spec.id.replace("chatcmpl-", "msg_", 1), fields)
        return await respond(gateway, request, chat, spec, [prompt], writer)
    except TwofoldError as error:
        if gateway.forwarder is not None and isinstance(error, UnsupportedError):
            raise
        return _error(error)


async def count_tokens(gateway: Gateway, request: Request) -> Response:
    """Answer `POST /v1/messages/count_tokens`."""
    try:
        fields = await read_struct(request, CountFields, gateway.bodies)
        gateway.check_model(fields.model)
        gateway.check_chat([each.content for each in fields.messages], fields.tools, "messages")
        chat = chat_fields(fields)
        token_ids = await encode_messages(gateway, chat, template_tools(offered_tools(chat)))
    except TwofoldError as error:
        return _error(error)
    return json_response({"input_tokens": len(token_ids)})


def _error(error: Exception) -> Response:
    answer = error_response_for(error)
    answer.body = msgspec.json.encode(_error_body(answer))
    answer.headers["content-length"] = str(len(answer.body))
    return answer


def _error_body(answer: Response) -> Json:
    detail = msgspec.json.decode(answer.body)["error"]
    return {
        "type": "error",
        "error": {"type": _ERRORS.get(answer.status_code, "api_error"), "message": detail["message"]},
    }


# -- requests -----------------------------------------------------------------------------------------------------


def chat_fields(fields: CountFields) -> schemas.ChatFields:
    """Return the chat request that a request of the Messages API means. Raises RequestError."""
    choice, tools = fields.tool_choice, [_tool(tool, f"tools[{n}]") for n, tool in enumerate(fields.tools or [])]
    thinks = None if fields.thinking is None else fields.thinking.type != "disabled"
    options: dict[str, Any] = {}
    if isinstance(fields, MessagesFields):
        options = {
            "max_tokens": fields.max_tokens,
            "stream": fields.stream,
            "stream_options": schemas.StreamOptions(continuous_usage_stats=True) if fields.stream else None,
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "top_k": fields.top_k,
            "stop": fields.stop_sequences,
        }
    return schemas.ChatFields(
        model=fields.model,
        messages=list(_messages(fields)),
        tools=tools or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        chat_template_kwargs=None if thinks is None else {"enable_thinking": thinks},
        **options,
    )


def _tool(tool: AnthropicTool, place: str) -> schemas.FunctionTool:
    if tool.input_schema is None:
        raise unsupported(f"{place}.input_schema", "this field is required; tools of the server are not supported")
    return schemas.FunctionTool(
        function=schemas.ToolFunction(name=tool.name, description=tool.description, parameters=tool.input_schema)
    )


def _choice(choice: AnthropicChoice) -> str | schemas.NamedTool:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "this field is required")
    return schemas.NamedTool(function=schemas.ChosenFunction(name=choice.name))


def _messages(fields: CountFields) -> Iterator[schemas.InputMessage]:
    if fields.system:
        yield schemas.InputMessage(role="system", content=text_of(fields.system, "system"))
    for number, message in enumerate(fields.messages):
        place = f"messages[{number}].content"
        if isinstance(message.content, str):
            yield schemas.InputMessage(role=message.role, content=message.content)
        else:
            yield from _of_blocks(message.role, message.content, place)


def _of_blocks(role: str, blocks: Sequence[MessageBlock], place: str) -> Iterator[schemas.InputMessage]:
    """Yield the results of tools, each as a message of its own, and then the rest as one message."""
    texts, thoughts, calls = list[str](), list[str](), list[schemas.ToolCall]()
    for number, block in enumerate(blocks):
        here = f"{place}[{number}]"
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use" and block.name is not None:
            arguments = msgspec.json.encode(block.input or {}).decode()
            calls.append(
                schemas.ToolCall(id=block.id, function=schemas.CalledFunction(name=block.name, arguments=arguments))
            )
        elif block.type == "tool_result":
            result = "" if block.content is None else text_of(block.content, f"{here}.content")
            yield schemas.InputMessage(role="tool", content=result, tool_call_id=block.tool_use_id)
        elif block.type != "redacted_thinking":
            raise unsupported(
                f"{here}.type", f"{block.type!r} is not supported; this service takes text and tools only"
            )
    yield from joined(role, texts, thoughts, calls)


# -- answers ------------------------------------------------------------------------------------------------------


class MessagesWriter(ResponseWriter):
    """Formats the response bodies and stream events of the Messages API."""

    def __init__(self, message_id: str, fields: MessagesFields) -> None:
        self._id, self._fields = message_id, fields
        self._open: str | None = None  # type of the content block that the stream is in
        self._blocks = 0

    def events(self, delta: Delta, usage: MaybeUsage) -> bytes:
        return b"".join(self._events(delta, usage))

    def error_event(self, error: Exception) -> bytes:
        return named_event(_error_body(error_response_for(error)))

    def response(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> Json:
        (deltas,) = choices
        thinking, text = (
            "".join(parts) for parts in zip(*((each.reasoning, each.text) for each in deltas), strict=True)
        )
        content: list[Json] = [{"type": "thinking", "thinking": thinking, "signature": ""}] if thinking else []
        content += [{"type": "text", "text": text}] if text else []
        content += [_tool_use(call) for delta in deltas for call in delta.calls]
        return self._message(content, usage) | _stop(deltas[-1])

    def _events(self, delta: Delta, usage: MaybeUsage) -> Iterator[bytes]:
        assert isinstance(usage, Usage)  # noqa: S101  (the request asks for the usage in every event)
        if not delta.token.index:
            yield named_event({"type": "message_start", "message": self._message([], usage)})
        if delta.reasoning:
            yield from self._in("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield from self._in("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": delta.text})
        for call in delta.calls:
            if call.name:
                yield from self._close()
                yield from self._in("tool_use", {"id": call.id, "name": call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        if delta.finish_reason is not None:
            yield from self._close()
            counts = {"output_tokens": usage.completion_tokens}
            yield named_event({"type": "message_delta", "delta": _stop(delta), "usage": counts})
            yield named_event({"type": "message_stop"})

    def _in(self, kind: str, fields: Json) -> Iterator[bytes]:
        """Open a content block, unless the stream is in one of this type."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        block = {"type": kind, **fields}
        yield named_event({"type": "content_block_start", "index": self._blocks, "content_block": block})

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield named_event({"type": "content_block_stop", "index": self._blocks})
            self._open = None
            self._blocks += 1

    def _delta(self, delta: Json) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _message(self, content: list[Json], usage: Usage) -> Json:
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._fields.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": usage.prompt_tokens - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": usage.completion_tokens,
            },
        }


def _tool_use(call: CallDelta) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _stop(delta: Delta) -> Json:
    reason = "max_tokens" if delta.finish_reason is FinishReason.LENGTH else "end_turn"
    if delta.stop is not None:
        reason = "stop_sequence"
    elif delta.called and delta.finish_reason is FinishReason.STOP:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": delta.stop}
