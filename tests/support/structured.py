"""Constraints of every kind, and independent checks of the outputs."""

import json
import re

import jsonschema

from twofold.request import Constraint, ConstraintKind

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])"
_SUM = 'start: number "+" number ("+" number)?\nnumber: /[1-9][0-9]?/'
_COLOURS = ["red", "green", "dark blue"]

CONSTRAINTS = {
    "json": Constraint(ConstraintKind.JSON, json.dumps(PERSON)),
    "regex": Constraint(ConstraintKind.REGEX, _DATE),
    "choice": Constraint(ConstraintKind.CHOICE, json.dumps(_COLOURS)),
    "grammar": Constraint(ConstraintKind.GRAMMAR, _SUM),
}
# The same constraints as fields of a request.
FIELDS: dict[str, dict[str, object]] = {
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    "regex": {"structured_outputs": {"regex": _DATE}},
    "choice": {"guided_choice": _COLOURS},
    "grammar": {"structured_outputs": {"grammar": _SUM}},
}


def matches(constraint: Constraint, text: str) -> bool:
    """Return whether a complete output matches one of `CONSTRAINTS`."""
    match constraint.kind:
        case ConstraintKind.JSON:
            jsonschema.validate(json.loads(text), PERSON)
            return True
        case ConstraintKind.REGEX:
            return re.fullmatch(_DATE, text) is not None
        case ConstraintKind.CHOICE:
            return text in _COLOURS
        case ConstraintKind.GRAMMAR:
            return re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?){1,2}", text) is not None
