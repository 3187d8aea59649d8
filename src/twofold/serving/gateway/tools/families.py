"""How families of models write reasoning and tool calls, for checkpoints without a response template.

A response template is the inverse of a chat template: transformers parses outputs with it (`ResponseParser`).
"""

from functools import cache
from importlib import resources
from typing import Any

import msgspec
from msgspec.structs import replace

Json = dict[str, Any]


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes tool calls, to force a model to write some."""

    before: str = ""  # of all calls
    name: str = '{"name": '
    arguments: str = ', "arguments": '
    end: str = "}"
    between: str = "\n"
    after: str = ""
    several: bool = True  # whether an answer may have several calls
    quotes: bool = True  # whether the name is a JSON string
    # In XML: what is before and after the key of an argument, and before and after its value, which is JSON. Line
    # breaks between them are optional.
    pair: tuple[str, str, str, str] | None = None


class ModelFamily(msgspec.Struct, frozen=True, kw_only=True):
    """A family of models: its response template, and how it writes tool calls."""

    title: str
    marks: tuple[str, ...]  # parts of the chat templates of this family
    template_of: str = ""  # name of the family with the same template
    template: Json = {}
    calls: CallFormat


_FILE = resources.files(__package__).joinpath("families.toml")
_READ = msgspec.toml.decode(_FILE.read_text("utf-8"), type=dict[str, ModelFamily])
FAMILIES = {name: replace(each, template=_READ[each.template_of or name].template) for name, each in _READ.items()}


@cache
def family_of(chat_template: str) -> ModelFamily | None:
    """Return the family of a model with this chat template; None if it is unknown."""
    return next((each for each in FAMILIES.values() if all(mark in chat_template for mark in each.marks)), None)


AUTO, NONE = "auto", "none"
PARSERS = {AUTO: "that of the checkpoint", NONE: "leaves the text as it is"}
PARSERS |= {name: family.title for name, family in FAMILIES.items()}


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
