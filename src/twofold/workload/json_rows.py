"""Reading jsonl: one object a line, checked against a msgspec type, errors with their line in plain words."""

import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from twofold.workload.lines import Lines

T = TypeVar("T", bound=msgspec.Struct)

_MISSING = re.compile(r"Object missing required field `(?P<key>[^`]*)`")
_WRONG = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<found>[^`]*)` - at `\$\.?(?P<key>[^`]*)`")
_NOT_AN_OBJECT = re.compile(r"Expected `object`, got `(?P<found>[^`]*)`")
_RANGE = re.compile(r"(?:Number|Integer value) out of range - at `\$\.?(?P<key>[^`]*)`")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


def json_rows(lines: Lines, kind: type[T]) -> Iterator[T]:
    """Each line as a `kind`; keys it does not have are ignored."""
    decoder = msgspec.json.Decoder(kind)
    for line in lines:
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise lines.error(reason(str(error))) from error
        except RecursionError as error:
            raise lines.error("the JSON is nested too deeply for a trace") from error


def json_keys(lines: Lines, line: str) -> tuple[str, ...]:
    """The keys of the object on a line."""
    try:
        return tuple(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError as error:
        raise lines.error(reason(str(error))) from error


def reason(message: str) -> str:
    """What msgspec says of a line, in words that need no knowledge of it."""
    if "truncated" in message:
        return "the JSON is cut off"
    if match := _MISSING.match(message):
        return f'missing key "{match["key"]}"'
    if match := _WRONG.match(message):
        return f'"{match["key"]}" is {_words(match["found"])} where {_words(match["wanted"])} is expected'
    if match := _NOT_AN_OBJECT.match(message):
        return f"{_words(match['found'])} where a JSON object is expected"
    if match := _RANGE.match(message):
        return f'"{match["key"]}" is a number out of range'
    return f"not valid JSON: {message.removeprefix('JSON is malformed: ')}"


def _words(kind: str) -> str:
    return " or ".join(_WORDS.get(part, part) for part in kind.split(" | "))
