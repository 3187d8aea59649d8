"""The endpoint `POST /v1/chat/completions`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from fastapi.responses import Response
from msgspec import UNSET
from starlette.requests import Request

from twofold.request import FinishReason
from twofold.serving.gateway import responses
from twofold.serving.gateway.gateway import Gateway, read_struct
from twofold.serving.gateway.generations import (
    CHARACTERS_PER_TOKEN,
    AnswerFormat,
    ResponseSpec,
    response_spec,
    server_fields,
)
from twofold.serving.gateway.output import Delta, LogprobFormat
from twofold.serving.gateway.schemas import (
    ChatFields,
    FunctionTool,
    InputMessage,
    ToolCall,
    invalid,
    text_of,
    unsupported,
)
from twofold.serving.gateway.streaming import OpenAIWriter, event, respond
from twofold.serving.gateway.tokenizer import off_loop
from twofold.serving.gateway.tools.families import Json
from twofold.serving.gateway.tools.forced_calls import forced_calls, offered_tools, template_tools
from twofold.serving.gateway.tools.message_parser import CallDelta

# OpenAI renamed the system role to developer; most templates support the old name only.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
UNSUPPORTED_PARTS = ("function_call", "audio", "refusal")
Prepared = TypeVar("Prepared", str, list[int])
_PROMPT_END = 64  # tokens of the prompt in which the answer may begin
_MESSAGE_CHARACTERS = 128  # a message takes a template as long as this many characters take the tokenizer


async def chat(gateway: Gateway, request: Request) -> Response:
    """Answer `POST /v1/chat/completions`. Raises RequestError, InstanceLostError and ClientDisconnect."""
    fields = await read_struct(request, ChatFields, gateway.bodies)
    spec, prompt = await start_chat(gateway, request, fields)
    spec = msgspec.structs.replace(spec, server_fields=server_fields(gateway, request, fields))
    writer = ChatWriter(spec, fields, LogprobFormat(gateway.tokenizer))
    return await respond(gateway, request, fields, spec, [prompt], writer)


async def start_chat(gateway: Gateway, request: Request, fields: ChatFields) -> tuple[ResponseSpec, str | list[int]]:
    """Return what the answer needs, and its prompt: token ids, or text that a server tokenizes. Raises RequestError."""
    spec = response_spec(gateway, request, fields, prompts=1)
    gateway.check_chat([each.content for each in fields.messages], fields.tools, "messages")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs", "requires logprobs: true")
    tools = offered_tools(fields)
    prepare = _render_messages if gateway.sends_text(fields) else encode_messages
    prompt = await prepare(gateway, fields, template_tools(tools))
    return _with_format(gateway, fields, spec, tools, prompt), prompt


async def encode_messages(gateway: Gateway, fields: ChatFields, tools: Sequence[Json] = ()) -> list[int]:
    """Return the token ids of chat messages in the model's chat template. Raises RequestError."""
    encode = partial(gateway.require_tokenizer("messages").encode_one, add_special_tokens=fields.adds_special_tokens)
    token_ids = await _prepare(gateway, fields, tools, encode)
    gateway.check_tokens(len(token_ids), "messages")
    return token_ids


async def _render_messages(gateway: Gateway, fields: ChatFields, tools: Sequence[Json]) -> str:
    return await _prepare(gateway, fields, tools, str)


async def _prepare(
    gateway: Gateway, fields: ChatFields, tools: Sequence[Json], finish: Callable[[str], Prepared]
) -> Prepared:
    """Return what `finish` makes of chat messages in the model's chat template. Raises RequestError."""
    tokenizer = gateway.require_tokenizer("messages")
    options = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        options.setdefault("reasoning_effort", fields.reasoning_effort)
        options.setdefault("enable_thinking", fields.reasoning_effort != "none")
    tools_bytes = len(msgspec.json.encode(tools)) if tools else 0

    def work() -> Prepared:
        messages = template_messages(fields.messages)
        gateway.check_length(sum(len(message["content"]) for message in messages), "messages")
        if tools:  # before the template renders them
            gateway.check_length(tools_bytes, "tools")
        if tools and "tools" not in tokenizer.chat_template:
            raise unsupported("tools", "this model's chat template has no tools")
        text = tokenizer.render_chat(
            messages,
            add_generation_prompt=fields.add_generation_prompt is not False,
            template_kwargs=options,
            tools=tools,
        )
        return finish(text)

    kwargs_bytes = len(msgspec.json.encode(options)) if options else 0
    prepared = await off_loop(tools_bytes + kwargs_bytes + sum(map(_weight, fields.messages)), work)
    if not prepared:
        raise invalid("messages", "the model's chat template renders an empty prompt")
    return prepared


def _weight(message: InputMessage) -> int:
    """Return the characters whose encoding takes about as long as a message."""
    content, calls = message.content, message.tool_calls or ()
    weight = _MESSAGE_CHARACTERS + len(message.reasoning_content or "")
    weight += sum(_MESSAGE_CHARACTERS + len(call.function.arguments) for call in calls)
    if isinstance(content, str):
        return weight + len(content)
    return weight + sum(_MESSAGE_CHARACTERS + len(part.text or "") for part in content or ())


def _with_format(
    gateway: Gateway, fields: ChatFields, spec: ResponseSpec, tools: Sequence[FunctionTool], prompt: str | list[int]
) -> ResponseSpec:
    """Add the form of the answer, and the constraint of an answer that must call tools. Raises RequestError."""
    tokenizer = gateway.require_tokenizer("messages")
    family = gateway.parsers.family(tokenizer.chat_template)
    template = gateway.parsers.template(tokenizer.chat_template, tokenizer.response_template)
    if template is None or (tools and "tool_calls" not in template["fields"]):
        if tools:
            raise unsupported("tools", "the form of this model's tool calls is unknown")
        return spec
    if isinstance(prompt, str):
        end = prompt[-_PROMPT_END * CHARACTERS_PER_TOKEN :]
    else:
        end = tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
    answer = AnswerFormat(template=template, prompt_end=end, tools=template_tools(tools), in_parts=bool(fields.stream))
    forced = None
    if tools and fields.tool_choice not in (None, "auto"):
        if family is None or not gateway.constrains:
            raise unsupported("tool_choice", "calls cannot be forced here: use auto", code="unsupported_value")
        forced = forced_calls(fields, tools, family, tokenizer, answer.parser().reasoning_end)
        answer = msgspec.structs.replace(answer, forced=forced is not None)
    if forced is not None and spec.given is not None:
        raise invalid(spec.given.field, "the output is already constrained by tool_choice")
    return msgspec.structs.replace(spec, given=forced or spec.given, format=answer)


def template_messages(messages: Sequence[InputMessage]) -> list[Json]:
    """Convert messages to the input of a chat template. Raises RequestError for unknown roles and non-text content."""
    if not messages:
        raise invalid("messages", "the list is empty; send at least one message")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: InputMessage, place: str) -> Json:
    if message.role not in ROLES:
        raise invalid(f"{place}.role", f"{message.role!r} is not supported; use one of {', '.join(ROLES)}")
    for field in UNSUPPORTED_PARTS:
        if getattr(message, field) not in (None, [], {}):
            raise unsupported(f"{place}.{field}", "not supported by this service")
    calls = message.tool_calls or []
    content = "" if calls and message.content is None else text_of(message.content, f"{place}.content")
    rendered: Json = {"role": ROLES[message.role], "content": content}
    for field in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            rendered[field] = value
    if calls:
        rendered["tool_calls"] = [_template_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return rendered


def _template_call(call: ToolCall, place: str) -> Json:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except msgspec.DecodeError as error:
        raise invalid(f"{place}.function.arguments", f"not valid JSON: {error}") from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


class ChatWriter(OpenAIWriter):
    """Formats the response bodies and stream events of chat completions."""

    def __init__(self, spec: ResponseSpec, fields: ChatFields, logprobs: LogprobFormat) -> None:
        super().__init__(texts_only=fields.wanted_logprobs is None and not fields.return_token_ids)
        self._spec, self._fields, self._logprobs = spec, fields, logprobs

    def events(self, delta: Delta, usage: responses.MaybeUsage) -> bytes:
        silent = delta.reasoning or delta.calls or delta.finish_reason is not None
        if self.texts_only and not silent and delta.token.index > 0 and not isinstance(usage, responses.Usage):
            return self.text_events(delta.choice, (delta.text,), usage)
        return self.whole_event(delta, usage)

    def whole_event(self, delta: Delta, usage: responses.MaybeUsage) -> bytes:
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
            message=_message(deltas),
            logprobs=self._logprobs_of(deltas),
            finish_reason=_reason(deltas[-1]),
            token_ids=self._token_ids_of(deltas),
        )

    def _chunk_choice(self, delta: Delta) -> responses.ChatChunkChoice:
        return responses.ChatChunkChoice(
            index=delta.choice,
            delta=_delta(delta),
            logprobs=self._logprobs_of((delta,)),
            finish_reason=_reason(delta),
            token_ids=self._token_ids_of((delta,)),
        )

    def _logprobs_of(self, deltas: Sequence[Delta]) -> responses.ChatLogprobs | None:
        top = self._fields.wanted_logprobs
        return None if top is None else self._logprobs.chat(deltas, top)

    def _token_ids_of(self, deltas: Sequence[Delta]) -> responses.MaybeTokenIds:
        return [delta.token.token_id for delta in deltas] if self._fields.return_token_ids else UNSET


def _message(deltas: Sequence[Delta]) -> responses.ChatMessage:
    text, reasoning = ("".join(parts) for parts in zip(*((each.text, each.reasoning) for each in deltas), strict=True))
    calls = [responses.ChatToolCall(id=call.id, function=_function(call)) for delta in deltas for call in delta.calls]
    return responses.ChatMessage(
        content=None if calls and not text else text, reasoning_content=reasoning or UNSET, tool_calls=calls or UNSET
    )


def _delta(delta: Delta) -> responses.ChatDelta:
    calls = [
        responses.ChatToolCallDelta(
            index=call.index, id=call.id or UNSET, type="function" if call.id else UNSET, function=_function(call)
        )
        for call in delta.calls
    ]
    silent = delta.reasoning or calls
    return responses.ChatDelta(
        content=UNSET if silent and not delta.text else delta.text,
        reasoning_content=delta.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _function(call: CallDelta) -> responses.ChatFunction:
    return responses.ChatFunction(name=call.name or UNSET, arguments=call.arguments)


def _reason(delta: Delta) -> str | None:
    return "tool_calls" if delta.called and delta.finish_reason is FinishReason.STOP else delta.finish_reason
