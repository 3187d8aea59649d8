"""Tool calls while the model writes them: name and arguments."""

import json
import re
from collections.abc import Sequence

import msgspec
import regex

from twofold.serving.gateway.tools.families import Json

_JSON_MARK = re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL)
_KEY = re.compile(r"\{content(?:\.(\w+))?\}")  # of the arguments in a call
_OBJECT = r"\s*(?=\{)"
_CALL = r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"%s"\s*:\s*(?=\{)'
_VALUE = "(?P<value>.*?)"  # in the pattern of a pair
_MOST_HEAD, _MOST_KEY = 1_000, 256  # characters before the arguments, and before a value in XML
_TYPES = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"}, dict: {"object"}}
_TYPES |= {type(None): {"null"}, str: set()}  # a bare string is no JSON
_WORDS = {"true": True, "1": True, "false": False, "0": False, "null": None, "none": None}
_ENCODER = msgspec.json.Encoder()


class JsonArguments:
    """Arguments that the model writes as a JSON object. Text after the object is ignored."""

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

    def finish(self) -> str:
        return ""

    def check_complete(self) -> None: ...  # a call that is cut off is no JSON


class XmlArguments:
    """Arguments that the model writes as pairs in XML: strings are sent as they arrive, other values at the end.

    Strings are bare, unless a grammar forces the call. transformers' parser takes a time quadratic in their text.
    """

    def __init__(self, pattern: str, schemas: Json, *, forced: bool) -> None:
        """`pattern` is the regular expression of a pair, and `schemas` has the JSON schemas of the arguments."""
        begin, _, end = pattern.partition(_VALUE)
        self._begin, self._end = (regex.compile(each, regex.DOTALL) for each in (begin, end))
        self._schemas, self._forced = schemas, forced
        self._text = ""  # not read yet
        self._key: str | None = None  # of the value that the text is in
        self._value, self._sent = list[str](), list[str]()  # parts of the value, and keys of the strings
        self._sends = False  # whether the value is sent as it arrives
        self.values: Json = {}

    def feed(self, text: str) -> str:
        """Return the JSON that a piece of the call's text adds."""
        self._text += text
        made = ""
        while True:
            key = self._key
            match = (self._begin if key is None else self._end).search(self._text, partial=True)
            start = len(self._text) if match is None else match.start()
            if key is not None:
                self._value.append(self._text[:start])
                made += _inner(self._text[:start]) if self._sends else ""
            # A line break may still belong to the beginning of a value.
            if match is None or match.partial or (key is None and match.end() == len(self._text)):
                self._text = self._text[-_MOST_KEY if key is None else start :]
                return made
            self._text = self._text[match.end() :]
            made += self._begin_value(match["key"]) if key is None else self._end_value(key)

    def finish(self) -> str:
        """Return the rest of the JSON; nothing if the text ends within a value."""
        rest = _inner({key: value for key, value in self.values.items() if key not in self._sent})
        return "" if self._key is not None else f"{'{' if not self._sent else ',' if rest else ''}{rest}}}"

    def check_complete(self) -> None:
        """Raise ValueError if the text ends within a value."""
        if self._key is not None:
            raise ValueError(f"it ends within the argument {self._key}")

    def _begin_value(self, key: str) -> str:
        self._key, self._value = key, []
        self._sends = not self._forced and key not in self.values and _types(self._schemas.get(key)) == {"string"}
        if not self._sends:
            return ""
        self._sent.append(key)
        return f'{"," if self._sent[1:] else "{"}"{_inner(key)}":"'

    def _end_value(self, key: str) -> str:
        text, self._key = "".join(self._value), None
        if key not in self.values:
            self.values[key] = _value(text, self._schemas.get(key), forced=self._forced)
        return '"' if self._sends else ""


def _value(text: str, schema: object, *, forced: bool) -> object:
    """Return the value of an argument: JSON of a type that its schema allows, or else the text."""
    types = _types(schema)
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = text
    if forced or not types:
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    if types & _TYPES[type(value)]:
        return value
    word = _WORDS.get(text.strip().lower(), text)  # Python's names, too
    return word if types & _TYPES[type(word)] else text


def _types(schema: object) -> set[str]:
    """Return the JSON types that a schema names."""
    known = as_object(schema)
    named = known.get("type", [])
    types = {named} if isinstance(named, str) else set(named)
    choices = [*known.get("anyOf", ()), *known.get("oneOf", ())]
    return types.union(*map(_types, choices), ["null"] if known.get("nullable") else [])


def _inner(value: str | Json) -> str:
    """Encode a string or an object as JSON, without what encloses it."""
    return _ENCODER.encode(value)[1:-1].decode()


class CallReader:
    """Reads calls that a response template describes as JSON, or as pairs in XML, while the model writes them."""

    def __init__(self, field: Json, tools: Sequence[Json], *, forced: bool) -> None:
        """`field` is the template's field of calls. With `forced`, a grammar forces the calls of these tools."""
        self._functions: dict[str, Json] = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._forced, content, options = forced, field.get("content"), field.get("content_args")
        key = _KEY.fullmatch(str(as_object(as_object(field.get("transform")).get("function")).get("arguments")))
        pattern: str = as_object(options).get("tag_pattern", "") if content == "xml-inline" else ""
        self.pattern = pattern if _VALUE in pattern else ""
        self._head = "" if self.pattern else None
        if content == "json" and (forced or not options) and key is not None:
            self._head = _CALL % key[1] if key[1] else _OBJECT

    def begin(self, text: str, name: str | None) -> tuple[str, JsonArguments | XmlArguments, str] | None:
        """Return the name of the call that `text` begins, its arguments, and their text so far.

        `name` is that before the text, if any. Return None if the arguments have not begun, or no tool has the name.
        """
        head = None if self._head is None else re.match(self._head, text[:_MOST_HEAD])
        if head is None:
            return None
        written = head.groupdict().get("name")
        called = (name or "") if written is None else json.loads(written)
        if called not in self._functions:
            return None
        return called, self.pairs(called) if self.pattern else JsonArguments(), text[head.end() :]

    def pairs(self, name: str) -> XmlArguments:
        """Return the arguments of a call in XML, before its text."""
        parameters = as_object(as_object(self._functions.get(name)).get("parameters"))
        return XmlArguments(self.pattern, as_object(parameters.get("properties")), forced=self._forced)


def as_object(value: object) -> Json:
    """Return a JSON object as it is, and an empty one for any other value."""
    return value if isinstance(value, dict) else {}
