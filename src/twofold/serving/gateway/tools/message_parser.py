"""Splits the text of a chat answer into content, reasoning and tool calls, with a response template."""

import json
import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from twofold.serving.gateway.tools.families import Json
from twofold.serving.gateway.tools.streamed_calls import CallReader, JsonArguments, XmlArguments

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

log = logging.getLogger(__name__)

_BETWEEN_CALLS = " \t\r\n;"
_PIECES = re.compile(r"[^>\]}]*[>\]}]|[^>\]}]+")  # each ends where a call may end
_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
)  # of the parser, for an answer that its template does not describe


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, or a part of it: its arguments are JSON together. Only the first part has an id and a name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What a piece of an answer's text adds to its message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


def together(parts: Sequence[Parts]) -> Parts:
    """Join what several pieces add to a message."""
    return Parts(
        content="".join(each.content for each in parts),
        reasoning="".join(each.reasoning for each in parts),
        calls=tuple(_joined(call for each in parts for call in each.calls)),
    )


def _joined(parts: Iterable[CallDelta]) -> Iterable[CallDelta]:
    calls: dict[int, CallDelta] = {}
    for part in parts:
        begun = calls.get(part.index)
        arguments = part.arguments if begun is None else begun.arguments + part.arguments
        calls[part.index] = msgspec.structs.replace(begun or part, arguments=arguments)
    return calls.values()


class MessageParser:
    """Parses one answer, piece by piece. A tool call that its template does not describe becomes content.

    With `in_parts`, arguments are returned as they arrive. Then a call stays a call if its end is invalid.
    """

    def __init__(
        self, template: Json, prompt_end: str, tools: Sequence[Json], *, forced: bool = False, in_parts: bool = False
    ) -> None:
        """`prompt_end` is the end of the prompt, which may have begun the answer. Without tools, none is called.

        With `forced`, a grammar forces calls, and all arguments are JSON.
        """
        self._in_parts = in_parts
        calls = template["fields"].get("tool_calls", {})
        self._reader = CallReader(calls, tools, forced=forced)
        if self._reader.pattern or (forced and calls.get("content") == "json"):
            # The reader reads pairs, and forced arguments are JSON.
            calls = {**calls, "content": "text" if self._reader.pattern else "json", "content_args": {}}
            template = {**template, "fields": {**template["fields"], "tool_calls": calls}}
        self._plain = {name: field for name, field in template["fields"].items() if name != "tool_calls"}
        self._template, self._tools = template, list(tools)
        # Of the call that the answer is in: its text so far, its arguments once it has begun, and its parts if held.
        self._call_text: str | None = None
        self._arguments: JsonArguments | XmlArguments | None = None
        self._held: list[CallDelta] = []
        anchors = template.get("start_anchor", ())
        begun = not anchors or any(each in prompt_end for each in ([anchors] if isinstance(anchors, str) else anchors))
        self._begin = prompt_end if begun else ""  # what comes before `_since`
        self._parser = self._new_parser(self._begin, calls=bool(tools))
        self._since, self._shown = "", 0  # text since the last call, and the number of its characters in the content
        self._gap = ""  # white space after a call, held back
        self._said, self._said_before = set[str](), set[str]()  # fields with text so far, and before `_since`
        self.calls = 0

    @property
    def reasoning_end(self) -> str | None:
        """The text that ends the reasoning that the prompt has begun; None if it has begun none."""
        last = self._parser.initial_events[-1:]
        if not last or last[0]["field"] != "reasoning_content" or last[0]["type"] == "region_close":
            return None
        close: str | list[str] | None = self._template["fields"]["reasoning_content"].get("close")
        return close[0] if isinstance(close, list) else close

    def feed(self, text: str) -> Parts:
        """Add a piece of text, and return what it adds."""
        # After an error, the parser has no events of the same text, so the end of a call is the end of a piece.
        parts = [self._feed(piece) for piece in _PIECES.findall(text)]
        return parts[0] if len(parts) == 1 else together(parts)

    def _feed(self, text: str) -> Parts:
        self._since += text
        try:
            return self._parts(self._parser.feed(text))
        except _ERRORS as error:
            return self._give_up(error)

    def finish(self) -> Parts:
        """End the answer, and return what was held back."""
        try:
            return self._parts(self._parser.finalize()[1])
        except _ERRORS as error:
            return together([self._give_up(error), self._parts(self._parser.finalize()[1])])

    def _new_parser(self, prefix: str, *, calls: bool) -> "ResponseParser":
        from transformers.utils import chat_parsing  # noqa: PLC0415  (slow to import)

        template = self._template if calls else {**self._template, "fields": self._plain}
        return chat_parsing.ResponseParser(template, prefix=prefix, tools=self._tools)

    def _parts(self, events: Sequence[Json]) -> Parts:
        content, reasoning, calls = list[str](), list[str](), list[CallDelta]()
        for event in events:
            field, kind, text = event["field"], event["type"], ""
            if field == "tool_calls":
                calls += self._call_event(kind, event)
            elif kind == "region_chunk":
                text = event["text"]
                self._said.add(field)
            elif kind == "region_open" and field in self._said:
                text = self._template["fields"][field].get("join", "")
            if field == "content":
                self._shown += len(text)
                content.append(self._without_gap(text))
            elif field == "reasoning_content":
                reasoning.append(text)
        if self._call_text is not None and self._arguments is None:
            captured = self._parser._captures.get("name")  # noqa: SLF001  (its events have no name)
            if (begun := self._reader.begin(self._call_text, captured)) is not None:
                name, self._arguments, text = begun
                calls.append(self._begin_call(name, self._arguments.feed(text)))
        if not self._in_parts:
            calls, self._held = self._split_calls([*self._held, *calls])
        return Parts(content="".join(content), reasoning="".join(reasoning), calls=tuple(calls))

    def _call_event(self, kind: str, event: Json) -> Iterator[CallDelta]:
        """Yield what an event of a call adds to the calls."""
        arguments, more = self._arguments, ""
        if kind == "region_open":
            self._call_text = ""
        elif kind == "region_chunk" and arguments is not None:
            more = arguments.feed(event["text"])
        elif kind == "region_chunk":
            self._call_text = (self._call_text or "") + event["text"]
        elif arguments is not None:
            if not self._in_parts:
                arguments.check_complete()
            more = arguments.finish()
            self._call_ended()
        else:
            value = event["value"]
            yield from map(self._whole_call, value if isinstance(value, list) else [value])
            self._call_ended()
        if more:
            yield CallDelta(index=self.calls - 1, arguments=more)

    def _split_calls(self, calls: Sequence[CallDelta]) -> tuple[list[CallDelta], list[CallDelta]]:
        """Separate the parts of complete calls, which are joined, from those of the running call."""
        complete = self.calls - (self._arguments is not None)
        ended = _joined(each for each in calls if each.index < complete)
        return list(ended), [each for each in calls if each.index >= complete]

    def _call_ended(self) -> None:
        self._call_text = self._arguments = None
        self._begin = self._since = self._gap = ""
        self._shown, self._said_before = 0, set(self._said)

    def _without_gap(self, text: str) -> str:
        """Hold back white space after a call until other content follows."""
        if self.calls and not text.strip(_BETWEEN_CALLS):
            self._gap += text
            return ""
        gap, self._gap = self._gap, ""
        return gap + text

    def _whole_call(self, call: Json) -> CallDelta:
        name = call["function"]["name"]
        if not isinstance(name, str):
            raise TypeError(f"the name of a tool is {name!r}")
        arguments = call["function"]["arguments"]
        if self._reader.pattern:
            pairs = self._reader.pairs(name)
            arguments = pairs.feed(arguments) + pairs.finish()
            pairs.check_complete()
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        if not isinstance(json.loads(text), dict):
            raise TypeError("the arguments of a tool are no object")
        return self._begin_call(name, text)

    def _begin_call(self, name: str, arguments: str) -> CallDelta:
        self.calls += 1
        return CallDelta(index=self.calls - 1, id=f"call_{secrets.token_hex(12)}", name=name, arguments=arguments)

    def _give_up(self, error: Exception) -> Parts:
        """From the last call on, take the text as content and reasoning alone."""
        log.warning("an answer has a tool call that is not in the format of its model's family: %.300s", error)
        begun = self._arguments is not None
        if begun and self._in_parts:
            self._call_ended()
            self._parser = self._new_parser("", calls=True)
            return Parts()
        self.calls -= begun
        self._call_text, self._arguments, self._held = None, None, []
        self._parser = self._new_parser(self._begin, calls=False)
        shown, self._shown, self._gap = self._shown - len(self._gap), 0, ""
        self._said = set(self._said_before)
        parts = self._parts(self._parser.feed(self._since))
        return Parts(content=parts.content[shown:])
