"""Requests of OpenAI's Responses API, and the chat requests that they mean."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from twofold.serving.gateway import schemas
from twofold.serving.gateway.schemas import joined, refuse_values, text_of, unsupported
from twofold.serving.gateway.tools.families import Json


class InputPart(schemas.ContentPart, frozen=True, kw_only=True):
    """Part of an item's content. Images and files are refused."""


class InputItem(Struct, frozen=True, kw_only=True):
    """Item of an input: a message, a call of a function, its output, or reasoning."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class ResponsesTool(Struct, frozen=True, kw_only=True):
    """A tool. The service runs none itself, so `type` must be function."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ChosenTool(Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True):
    """Options of reasoning. `summary` has no effect: the reasoning is returned as it is."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(Struct, frozen=True, kw_only=True):
    """Constraint on the output."""

    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesFields(Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/responses`."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: schemas.Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: schemas.CacheKey | None = None
    prompt_cache_retention: str | None = None
    truncation: object = None
    background: object = None
    conversation: object = None
    prompt: object = None


# Unsupported fields, with the values besides null that have no effect on the answer.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
}


_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")  # types of parts with text


def chat_of(fields: ResponsesFields, messages: Sequence[schemas.InputMessage]) -> schemas.ChatFields:
    """Return the chat request for a request, with the messages of its conversation. Raises RequestError."""
    refuse_values(fields, NEUTRAL)
    system = [] if fields.instructions is None else [schemas.InputMessage(role="system", content=fields.instructions)]
    form = None if fields.text is None or fields.text.format is None else _format(fields.text.format)
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(fields.tools or [])]
    return schemas.ChatFields(
        model=fields.model,
        messages=[*system, *messages],
        stream=fields.stream,
        stream_options=schemas.StreamOptions(continuous_usage_stats=True) if fields.stream else None,
        max_completion_tokens=fields.max_output_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        tools=tools or None,
        tool_choice=_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls,
        reasoning_effort=None if fields.reasoning is None else fields.reasoning.effort,
        prompt_cache_key=fields.prompt_cache_key,
        prompt_cache_retention=fields.prompt_cache_retention,
        response_format=form,
    )


def new_messages(fields: ResponsesFields) -> list[schemas.InputMessage]:
    """Return the messages of a request's input. Raises RequestError for other content than text."""
    if isinstance(fields.input, str):
        return [schemas.InputMessage(role="user", content=fields.input)]
    return list(_messages(fields.input))


def items_of(fields: ResponsesFields) -> list[Json]:
    """Return the input of a request as a list of items."""
    if isinstance(fields.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": fields.input}]}]
    items: list[Json] = [msgspec.to_builtins(item) for item in fields.input]
    return [{name: value for name, value in item.items() if value is not None} for item in items]


def _messages(items: Sequence[InputItem]) -> Iterator[schemas.InputMessage]:
    """Yield the messages of input items. Consecutive items of the assistant are one message."""
    texts, thoughts, calls = list[str](), list[str](), list[schemas.ToolCall]()
    for number, item in enumerate(items):
        place = f"input[{number}]"
        if item.type == "message" and item.role == "assistant":
            texts.append(text_of(item.content, f"{place}.content", _TEXTS))
        elif item.type == "reasoning":
            thoughts.append(text_of(item.content or item.summary or "", place, _TEXTS))
        elif item.type == "function_call" and item.name is not None:
            call = schemas.CalledFunction(name=item.name, arguments=item.arguments or "{}")
            calls.append(schemas.ToolCall(id=item.call_id, function=call))
        else:
            yield from joined("assistant", texts, thoughts, calls)
            texts, thoughts, calls = [], [], []
            yield _other(item, place)
    yield from joined("assistant", texts, thoughts, calls)


def _other(item: InputItem, place: str) -> schemas.InputMessage:
    if item.type == "function_call_output":
        output = text_of(item.output, f"{place}.output", _TEXTS)
        return schemas.InputMessage(role="tool", content=output, tool_call_id=item.call_id)
    if item.type != "message" or item.role is None:
        raise unsupported(
            f"{place}.type", f"{item.type!r} is not supported: use messages, function calls and reasoning"
        )
    return schemas.InputMessage(role=item.role, content=text_of(item.content, f"{place}.content", _TEXTS))


def _tool(tool: ResponsesTool, place: str) -> schemas.FunctionTool:
    if tool.type != "function" or tool.name is None:
        raise unsupported(
            f"{place}.type", f"{tool.type!r} is not supported: this service runs no tools itself, use function"
        )
    return schemas.FunctionTool(
        function=schemas.ToolFunction(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    )


def _choice(choice: str | ChosenTool | None) -> str | schemas.NamedTool | None:
    if not isinstance(choice, ChosenTool):
        return choice
    if choice.type != "function" or choice.name is None:
        raise unsupported("tool_choice", f"{choice.type!r} is not supported: use none, auto, required or a function")
    return schemas.NamedTool(function=schemas.ChosenFunction(name=choice.name))


def _format(given: TextFormat) -> schemas.ResponseFormat:
    schema = schemas.JsonSchemaFormat(
        schema=given.schema, name=given.name, description=given.description, strict=given.strict
    )
    return schemas.ResponseFormat(type=given.type, json_schema=schema if given.type == "json_schema" else None)
