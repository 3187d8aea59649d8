"""Tools of a chat request: their form in a chat template, and constraints that force a model to call them."""

import json
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from twofold.engine.grammar import WHITESPACE
from twofold.request import Constraint, ConstraintKind
from twofold.serving.gateway.schemas import ChatFields, FunctionTool, NamedTool, invalid, unsupported
from twofold.serving.gateway.structured import GivenConstraint
from twofold.serving.gateway.tokenizer import TextTokenizer
from twofold.serving.gateway.tools.families import CallFormat, Json, ModelFamily

_NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}
# Parts of Lark grammars.
_ANY: Final = "/(?s:.*)/"
_LINE: Final = r'"\n"?'


def offered_tools(fields: ChatFields) -> list[FunctionTool]:
    """Return the tools that the model may call. Raises RequestError for a wrong choice of tools."""
    tools, choice = fields.tools or [], fields.tool_choice
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise unsupported(f"tools[{index}].type", f"{tool.type!r} is not supported: use function")
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            raise invalid("tool_choice", f"there is no tool {choice.function.name!r}")
        return chosen
    if choice not in (None, "none", "auto", "required"):
        raise invalid("tool_choice", f"{choice!r} is unknown: use none, auto, required or a function")
    if choice == "required" and not tools:
        raise invalid("tool_choice", "required needs tools")
    return [] if choice == "none" else tools


def template_tools(tools: Sequence[FunctionTool]) -> list[Json]:
    """Return the tools as chat templates expect them."""
    shown = []
    for tool in tools:
        function: Json = {"name": tool.function.name, "parameters": tool.function.parameters or _NO_ARGUMENTS}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        shown.append({"type": "function", "function": function})
    return shown


def forced_calls(
    fields: ChatFields,
    tools: Sequence[FunctionTool],
    family: ModelFamily,
    tokenizer: TextTokenizer,
    reasoning_end: str | None = None,
) -> GivenConstraint | None:
    """Return the constraint of an answer that must call tools; None if it need not.

    The text `reasoning_end` ends the reasoning with which the answer begins; None if the answer begins with calls.
    Raises RequestError if the calls of one of the tools cannot be forced.
    """
    named = isinstance(fields.tool_choice, NamedTool)
    if not named and fields.tool_choice != "required":
        return None
    several = not named and fields.parallel_tool_calls is not False
    grammar = _grammar(family.calls, tools, tokenizer, several, reasoning_end)
    return GivenConstraint("tool_choice", Constraint(ConstraintKind.LARK, grammar))


def _grammar(
    form: CallFormat, tools: Sequence[FunctionTool], tokenizer: TextTokenizer, several: bool, reasoning_end: str | None
) -> str:
    """Return a Lark grammar of one or several calls in the form of a family."""

    def text(literal: str) -> str:
        parts = tokenizer.special_parts(literal)
        return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)

    between = _LINE if form.pair else text(form.between)
    repeated = f"call ({between} call)*" if several and form.several else "call"
    begin = "" if reasoning_end is None else "reasoning"
    lines = [
        f"start: {begin} {text(form.before)} {repeated} {text(form.after)}",
        f"call: {' | '.join(f'call{number}' for number in range(len(tools)))}",
    ]
    if reasoning_end is not None:
        end = text(reasoning_end)
        is_text = end == json.dumps(reasoning_end)
        lines.append(f"reasoning[suffix={end}]: {_ANY}" if is_text else f"reasoning: {_ANY} {end}")
    for number, tool in enumerate(tools):
        name = json.dumps(tool.function.name) if form.quotes else tool.function.name
        schema = tool.function.parameters or _NO_ARGUMENTS
        head = text(f"{form.name}{name}{form.arguments}")
        lines.append(f"call{number}: {head} arguments{number} {text(form.end)}")
        if form.pair:
            pair = [text(each) for each in form.pair]
            lines.extend(_pairs(f"arguments{number}", tool.function.name, schema, pair))
        else:
            lines.append(f"arguments{number}: {_json(schema)}")
    return "\n".join(lines)


class _PairedParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """JSON schema of arguments that can be written as pairs. Additional properties are never written."""

    type: Literal["object"] = "object"
    properties: dict[str, Json] = {}
    required: list[str] = []
    additional: object = msgspec.field(name="additionalProperties", default=None)
    defs: Json = msgspec.field(name="$defs", default={})
    definitions: Json = {}
    schema: str = msgspec.field(name="$schema", default="")
    title: str = ""
    description: str = ""


def _pairs(rule: str, tool: str, schema: Json, pair: Sequence[str]) -> Iterator[str]:
    """Yield the rules of arguments as pairs of keys and values, in the order of the schema. Strings are JSON, too."""
    before, after, begin, end = pair
    try:
        parameters = msgspec.convert(schema, _PairedParameters)
    except msgspec.ValidationError as error:
        raise invalid("tool_choice", f"calls of {tool} cannot be forced with this model: {error}") from error
    unknown = sorted(set(parameters.required) - set(parameters.properties))
    if unknown:
        raise invalid("tool_choice", f"calls of {tool} cannot be forced: it requires {unknown[0]}, an unknown property")
    shared = {"$defs": parameters.defs, "definitions": parameters.definitions}
    pairs = [
        f"{rule}_{number}" if key in parameters.required else f"{rule}_{number}?"
        for number, key in enumerate(parameters.properties)
    ]
    yield f"{rule}: {_LINE} {' '.join(pairs)}"
    for number, (key, value) in enumerate(parameters.properties.items()):
        each = f"{rule}_{number}"
        yield f"{each}: {before} {json.dumps(key)} {after} {_LINE} {begin} {each}_value {_LINE} {end} {_LINE}"
        yield f"{each}_value: {_json(shared | value)}"


def _json(schema: Json) -> str:
    limited = schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(limited)}"
