"""Tool calls of streams: name and arguments of a call while the model writes it."""

import json
import re
from collections.abc import Collection, Mapping

import msgspec
import regex

from twofold.serving.gateway.tools.families import Json

_JSON_MARK = re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL)
_KEY = re.compile(r"\{content(?:\.(\w+))?\}")  # of the arguments in a call
_OBJECT = r"\s*(?=\{)"
_CALL = r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"%s"\s*:\s*(?=\{)'
_VALUE = "(?P<value>.*?)"  # in the pattern of an argument in XML
_MOST_HEAD = 1_000  # characters before the arguments
_ENCODER = msgspec.json.Encoder()


class _JsonArguments:
    """Arguments that the model writes as a JSON object. What follows the object is ignored."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._ended = False
        self._held = ""  # a backslash

    def feed(self, text: str) -> str:
        if self._ended:
            return ""
        text, self._held = self._held + text, ""
        for match in _JSON_MARK.finditer(text):
            mark = match[0]
            if mark == "\\":
                self._held = mark
                return text[:-1]
            if mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += (mark in "{[") - (mark in "}]")
                if not self._depth:
                    self._ended = True
                    return text[: match.end()]
        return text

    def finish(self, _arguments: Json) -> str:
        return ""


class _XmlArguments:
    """Arguments that the model writes as pairs in XML: `strings` as they arrive, the others at the end of the call."""

    def __init__(self, pattern: str, strings: Collection[str]) -> None:
        begin, _, end = pattern.partition(_VALUE)
        self._begin, self._end = (regex.compile(each, regex.DOTALL) for each in (begin, end))
        self._strings, self._sent = strings, list[str]()
        self._text = ""  # not read yet
        self._in_value = self._in_string = False

    def feed(self, text: str) -> str:
        self._text += text
        made = ""
        while True:
            match = (self._end if self._in_value else self._begin).search(self._text, partial=True)
            # A line break may still belong to what begins a value.
            whole = match is not None and not match.partial and (self._in_value or match.end() < len(self._text))
            if self._in_string:
                value = self._text[: match.start()] if match else self._text
                made += _inner(value) + '"' * whole
                self._text = self._text[len(value) :]
            if match is None or not whole:
                return made
            self._text = self._text[match.end() - match.start() if self._in_string else match.end() :]
            self._in_value, self._in_string = not self._in_value, False
            if self._in_value and match["key"] in self._strings and match["key"] not in self._sent:
                made += f'{"," if self._sent else "{"}"{_inner(match["key"])}":"'
                self._sent.append(match["key"])
                self._in_string = True

    def finish(self, arguments: Json) -> str:
        if self._in_string:
            return ""  # the answer ends within the call
        rest = _inner({key: value for key, value in arguments.items() if key not in self._sent})
        return f"{'{' if not self._sent else ',' if rest else ''}{rest}}}"


def _inner(value: str | Json) -> str:
    """Encode a string or an object as JSON, without what encloses it."""
    return _ENCODER.encode(value)[1:-1].decode()


class StreamedCall:
    """A call while the model writes it. It begins with its arguments, unless no tool has its name.

    The whole call comes at its end if a template describes neither JSON nor pairs in XML.
    """

    def __init__(self, field: Json, tools: Mapping[str, Json], *, forced: bool) -> None:
        """`field` is the field of calls in a response template. `tools` has functions by name."""
        self._tools, self._forced = tools, forced
        self._head = self._pattern = ""
        content, options = field.get("content"), as_object(field.get("content_args"))
        made = as_object(as_object(field.get("transform")).get("function"))
        key = _KEY.fullmatch(str(made.get("arguments")))
        if content == "xml-inline" and options.keys() == {"tag_pattern"}:
            self._pattern = options["tag_pattern"]
        elif content == "json" and not options and key is not None:
            self._head = _CALL % key[1] if key[1] else _OBJECT
        self._text = ""  # before it begins
        self._arguments: _JsonArguments | _XmlArguments | None = None
        self.name = ""  # once it has begun

    def feed(self, text: str) -> str:
        """Take a piece of the call's text, and return what it adds to the arguments of a call that has begun."""
        if self._arguments is not None:
            return self._arguments.feed(text)
        self._text += text
        return ""

    def begin(self, name: str | None) -> str | None:
        """Begin if possible, and return the arguments so far; else None. `name` is that before the text, if any."""
        head = re.match(self._head, self._text[:_MOST_HEAD])
        if head is None or not (self._head or self._pattern):
            return None
        written = head.groupdict().get("name")
        function = self._tools.get((name or "") if written is None else json.loads(written))
        if function is None:
            return None
        self.name = function["name"]
        self._arguments = _JsonArguments() if self._head else _XmlArguments(self._pattern, self._strings(function))
        return self._arguments.feed(self._text[head.end() :])

    def finish(self, arguments: object) -> str:
        """Return the rest of all `arguments`."""
        return "" if self._arguments is None else self._arguments.finish(as_object(arguments))

    def _strings(self, function: Json) -> list[str]:
        """Return the parameters whose value is the text itself. If calls are forced, all values are JSON."""
        known = as_object(as_object(function.get("parameters")).get("properties"))
        return [] if self._forced else [key for key, each in known.items() if _is_string(as_object(each))]


def _is_string(schema: Json) -> bool:
    return schema.get("type") == "string" and schema.keys().isdisjoint(("anyOf", "oneOf", "nullable"))


def as_object(value: object) -> Json:
    """Return a JSON object as it is, and an empty one for any other value."""
    return value if isinstance(value, dict) else {}
