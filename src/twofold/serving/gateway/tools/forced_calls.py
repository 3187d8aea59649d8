"""Tools of a chat request: their form in a chat template, and constraints that force a model to call them."""

import json
from collections.abc import Sequence

from twofold.request import Constraint, ConstraintKind
from twofold.serving.gateway.schemas import ChatFields, FunctionTool, NamedTool, invalid, unsupported
from twofold.serving.gateway.structured import GivenConstraint
from twofold.serving.gateway.tokenizer import TextTokenizer
from twofold.serving.gateway.tools.families import CallFormat, Json, ModelFamily

_NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}


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
    fields: ChatFields, tools: Sequence[FunctionTool], family: ModelFamily, tokenizer: TextTokenizer
) -> GivenConstraint | None:
    """Return the constraint of an answer that must call tools; None if it need not.

    Raises RequestError if the family's calls cannot be forced.
    """
    named = isinstance(fields.tool_choice, NamedTool)
    if not named and fields.tool_choice != "required":
        return None
    if family.calls is None:
        raise unsupported(
            "tool_choice", "calls of this model's family cannot be forced: use auto", code="unsupported_value"
        )
    several = not named and fields.parallel_tool_calls is not False
    return GivenConstraint(
        "tool_choice", Constraint(ConstraintKind.LARK, _grammar(family.calls, tools, tokenizer, several))
    )


def _grammar(form: CallFormat, tools: Sequence[FunctionTool], tokenizer: TextTokenizer, several: bool) -> str:
    """Return a Lark grammar of one or several calls in the form of a family."""

    def text(literal: str) -> str:
        return " ".join(map(_terminal, tokenizer.special_parts(literal)))

    repeated = f"call ({text(form.between)} call)*" if several else "call"
    lines = [
        f"start: {text(form.before)} {repeated} {text(form.after)}",
        f"call: {' | '.join(f'call{number}' for number in range(len(tools)))}",
    ]
    for number, tool in enumerate(tools):
        name = json.dumps(tool.function.name) if form.quotes else tool.function.name
        schema = json.dumps(tool.function.parameters or _NO_ARGUMENTS)
        begin = text(f"{form.name}{name}{form.arguments}")
        lines.append(f"call{number}: {begin} arguments{number} {text(form.end)}")
        lines.append(f"arguments{number}: %json {schema}")
    return "\n".join(lines)


def _terminal(part: str | int) -> str:
    return f"<[{part}]>" if isinstance(part, int) else json.dumps(part)
