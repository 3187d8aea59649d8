"""How families of models write reasoning and tool calls, for checkpoints without a response template.

A response template is the inverse of a chat template: transformers parses outputs with it (`ResponseParser`).
"""

from functools import cache
from typing import Any

import msgspec

Json = dict[str, Any]


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes tool calls, to force a model to write some."""

    before: str = ""  # of all calls
    name: str = '{"name": '
    arguments: str = ', "arguments": '
    end: str = "}"
    between: str | None = "\n"  # None: an answer has one call
    after: str = ""
    quotes: bool = True  # whether the name is a JSON string
    pairs: bool = False  # whether the arguments are GLM's pairs of keys and values, with line breaks or without


class ModelFamily(msgspec.Struct, frozen=True, kw_only=True):
    """A family of models: its response template, and how it writes tool calls if they can be forced."""

    marks: tuple[str, ...]  # parts of the chat templates of this family
    template: Json
    calls: CallFormat | None = None


def _call(name: str = "{content.name}", arguments: str = "{content.arguments}") -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _template(anchor: str, tool_calls: Json, *, thinks: bool = True, ends: str | None = None) -> Json:
    """Return a response template of tool calls and content. `ends` comes after all calls."""
    fields: Json = {"content": {"content_args": {"strip": False}}, "tool_calls": {"repeats": True, **tool_calls}}
    if thinks:
        fields["reasoning_content"] = {"open": "<think>", "close": "</think>", "content_args": {"strip": False}}
    if ends is not None:
        fields["ignored"] = {"open": ends, "close_pattern": r"\Z"}
    return {"start_anchor": anchor, "fields": fields}


_HERMES = ModelFamily(
    marks=("<tool_call>", "</tool_call>"),
    template=_template(
        "<|im_start|>assistant",
        {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": _call()},
    ),
    calls=CallFormat(name='<tool_call>\n{"name": ', end="}\n</tool_call>"),
)
_GLM = ModelFamily(
    marks=("<tool_call>", "<arg_key>"),
    template=_template(
        "<|assistant|>",
        {
            "open_pattern": r"<tool_call>(?P<name>[^\s<]+)",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": _call("{name}", "{content}"),
        },
    ),
    calls=CallFormat(name="<tool_call>", arguments="", end="</tool_call>", quotes=False, pairs=True),
)
_LLAMA = ModelFamily(
    marks=("<|start_header_id|>", '"parameters"'),
    template=_template(
        "<|start_header_id|>assistant<|end_header_id|>",
        {
            "open_pattern": r"(?:<\|python_tag\|>)?(?=\{\s*\"(?:name|type)\"\s*:)",
            "close_pattern": r"(?<=\})(?=\s*;)",
            "content": "json",
            "transform": _call(arguments="{content.parameters}"),
        },
        thinks=False,
    ),
    calls=CallFormat(arguments=', "parameters": ', between="; "),
)
_MISTRAL = ModelFamily(
    marks=("[TOOL_CALLS]", "[/INST]"),
    template=_template(
        "[/INST]",
        {
            "open": "[TOOL_CALLS]",
            "close_pattern": r"\Z",
            "content": "json",
            "repeats": False,
            "transform_each": True,
            "transform": _call("{name}", "{arguments}"),
        },
        thinks=False,
    ),
    calls=CallFormat(before="[TOOL_CALLS] [", between=", ", after="]"),
)
_MISTRAL_ARGS = ModelFamily(
    marks=("[TOOL_CALLS]", "[ARGS]"),
    template=_template(
        "[/INST]",
        {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)\[ARGS\]",
            "close_pattern": r"(?<=\})\s*(?=\[)",  # which JSON does not contain
            "content": "json",
            "transform": _call("{name}", "{content}"),
        },
        thinks=False,
    ),
    calls=CallFormat(name="[TOOL_CALLS]", arguments="[ARGS]", end="", between="", quotes=False),
)
_DEEPSEEK = ModelFamily(
    marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),
    template=_template(
        "<｜Assistant｜>",
        {
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>"
            r"(?:function<｜tool▁sep｜>)?(?P<name>(?!function<)[\w.-]+)(?:<｜tool▁sep｜>|\n```json\n)",
            "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>",
            "content": "json",
            "transform": _call("{name}", "{content}"),
        },
        ends="<｜tool▁calls▁end｜>",
    ),
    calls=CallFormat(
        before="<｜tool▁calls▁begin｜>",
        name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        arguments="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        after="<｜tool▁calls▁end｜>",
        quotes=False,
    ),
)
_DEEPSEEK_V31 = ModelFamily(
    marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    template=_DEEPSEEK.template,  # reads both forms
    calls=CallFormat(
        before="<｜tool▁calls▁begin｜>",
        name="<｜tool▁call▁begin｜>",
        arguments="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        between="",
        after="<｜tool▁calls▁end｜>",
        quotes=False,
    ),
)
_GEMMA = ModelFamily(
    marks=("<start_of_turn>", "<start_function_call>"),
    template=_template(
        "<start_of_turn>model",
        {
            "open_pattern": r"<start_function_call>call:(?P<name>[\w.-]+)",
            "close": "<end_function_call>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
            "transform": _call("{name}", "{content}"),
        },
        thinks=False,
    ),
)
_GPT_OSS = ModelFamily(
    marks=("<|channel|>", "<|constrain|>"),
    template={
        "start_anchor": "<|start|>assistant",
        "fields": {
            "content": {
                "open_pattern": r"<\|channel\|>final(?:[^<]*)<\|message\|>",
                "close_pattern": r"<\|(?:return|end)\|>",
                "content_args": {"strip": False},
            },
            "reasoning_content": {
                "open_pattern": r"<\|channel\|>analysis<\|message\|>",
                "close": "<|end|>",
                "repeats": True,
                "join": "\n",
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|channel\|>commentary)? ?to=functions\.(?P<name>[\w.-]+)"
                r"(?:<\|channel\|>commentary)?[^<]*(?:<\|constrain\|>json)?<\|message\|>",
                "close_pattern": r"<\|(?:call|end)\|>",
                "content": "json",
                "repeats": True,
                "transform": _call("{name}", "{content}"),
            },
        },
    },
    # <|call|> ends the generation: it is no part of the form.
    calls=CallFormat(
        name="<|channel|>commentary to=functions.",
        arguments=" <|constrain|>json<|message|>",
        end="",
        between=None,
        quotes=False,
    ),
)

# The first family all of whose marks are in a chat template is taken.
FAMILIES = {
    "glm": _GLM,
    "hermes": _HERMES,
    "mistral-args": _MISTRAL_ARGS,
    "mistral": _MISTRAL,
    "deepseek": _DEEPSEEK,
    "deepseek-v31": _DEEPSEEK_V31,
    "gpt-oss": _GPT_OSS,
    "llama3": _LLAMA,
    "gemma": _GEMMA,
}


@cache
def family_of(chat_template: str) -> ModelFamily | None:
    """Return the family of a model with this chat template; None if it is unknown."""
    return next((each for each in FAMILIES.values() if all(mark in chat_template for mark in each.marks)), None)


AUTO, NONE = "auto", "none"
PARSERS = {
    AUTO: "that of the checkpoint",
    NONE: "leaves the text as it is",
    "glm": "GLM",
    "hermes": "Hermes, Qwen",
    "mistral-args": "Mistral with [ARGS]",
    "mistral": "Mistral with a list of calls",
    "deepseek": "DeepSeek V3, R1",
    "deepseek-v31": "DeepSeek V3.1",
    "gpt-oss": "gpt-oss",
    "llama3": "Llama 3",
    "gemma": "FunctionGemma",
}


class AnswerParsers(msgspec.Struct, frozen=True):
    """Families by whose formats tool calls and reasoning are found in answers.

    `auto` follows the checkpoint: its response template, or the family of its chat template. `none` leaves the text as
    it is.
    """

    tools: str = AUTO
    reasoning: str = AUTO

    def family(self, chat_template: str) -> ModelFamily | None:
        """Return the family that writes the tool calls of a model with this chat template; None if it is unknown."""
        return family_of(chat_template) if self.tools == AUTO else FAMILIES.get(self.tools)

    def template(self, chat_template: str, own: Json | None) -> Json | None:
        """Return the response template of a model whose checkpoint brings the template `own`; None if it is unknown."""
        found = family_of(chat_template)
        auto = own or (None if found is None else found.template)
        if self.tools == self.reasoning == AUTO:
            return auto
        named = {parser: FAMILIES[parser].template for parser in (self.tools, self.reasoning) if parser in FAMILIES}
        base = named.get(self.tools) or auto or named.get(self.reasoning)
        if base is None:
            return None
        fields = dict(base["fields"])
        if self.tools == NONE:
            fields.pop("tool_calls", None)
        thoughts = auto if self.reasoning == AUTO else named.get(self.reasoning)
        if self.reasoning != AUTO or thoughts is not None:
            fields.pop("reasoning_content", None)
        if thoughts is not None and "reasoning_content" in thoughts["fields"]:
            fields["reasoning_content"] = thoughts["fields"]["reasoning_content"]
        return base | {"fields": fields}


BY_CHECKPOINT = AnswerParsers()
