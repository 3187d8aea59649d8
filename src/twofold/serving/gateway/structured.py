"""Structured output: the constraint of a request, in the forms of OpenAI and vLLM."""

import asyncio

import msgspec

from twofold.engine.grammar import GrammarError
from twofold.request import Constraint, ConstraintKind
from twofold.serving.gateway.gateway import Gateway
from twofold.serving.gateway.schemas import GenerationFields, ResponseFormat, StructuredOutputs, invalid, unsupported

_ANY_OBJECT = Constraint(ConstraintKind.JSON, '{"type":"object"}')


class GivenConstraint(msgspec.Struct, frozen=True):
    """A constraint, and the request field that gives it."""

    field: str
    constraint: Constraint


def given_constraint(fields: GenerationFields) -> GivenConstraint | None:
    """Return the constraint of a request. Raises RequestError if there are several, or one is incomplete."""
    found = [
        *_of_format(fields.response_format),
        *_of_structured(fields.structured_outputs, "structured_outputs."),
        *_of_structured(
            StructuredOutputs(
                json=fields.guided_json,
                regex=fields.guided_regex,
                choice=fields.guided_choice,
                grammar=fields.guided_grammar,
            ),
            "guided_",
        ),
    ]
    if len(found) > 1:
        raise invalid(found[1].field, f"the output is already constrained by {found[0].field}")
    return found[0] if found else None


async def check_constraint(gateway: Gateway, given: GivenConstraint | None) -> None:
    """Raise RequestError if the service cannot constrain an output so. Long compilations run in a thread."""
    if given is None:
        return
    field, most = given.field, gateway.limits.constraint_characters
    if not gateway.constrains:
        raise unsupported(field, "this service cannot constrain its output: it has no tokenizer, or an emulated engine")
    if len(given.constraint.text) > most:
        raise invalid(field, f"{len(given.constraint.text)} characters are more than the limit of {most}")
    if gateway.grammars is None:  # the servers behind this gateway check it
        return
    try:
        # Shielded: other requests with this constraint wait for the same compilation.
        await asyncio.shield(asyncio.wrap_future(gateway.grammars.compile(given.constraint)))
    except GrammarError as error:
        raise invalid(field, str(error), code="invalid_grammar") from error


def _of_format(given: ResponseFormat | None) -> list[GivenConstraint]:
    field = "response_format"
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [GivenConstraint(field, _ANY_OBJECT)]
    if given.type != "json_schema":
        raise unsupported(f"{field}.type", f"{given.type!r} is not supported: use text, json_object or json_schema")
    if given.json_schema is None or given.json_schema.schema is None:
        raise invalid(f"{field}.json_schema", "a schema is required")
    return [GivenConstraint(f"{field}.json_schema", _json(given.json_schema.schema))]


def _of_structured(given: StructuredOutputs | None, prefix: str) -> list[GivenConstraint]:
    if given is None:
        return []
    if given.structural_tag is not None:
        raise unsupported(f"{prefix}structural_tag", "not supported by this service: use json, regex or grammar")
    found: dict[str, Constraint] = {}
    if given.json is not None:
        found["json"] = _json(given.json)
    if given.json_object:
        found["json_object"] = _ANY_OBJECT
    if given.regex is not None:
        found["regex"] = Constraint(ConstraintKind.REGEX, given.regex)
    if given.choice is not None:
        if not all(given.choice) or not given.choice:
            raise invalid(f"{prefix}choice", "the list or one of its strings is empty")
        found["choice"] = Constraint(ConstraintKind.CHOICE, msgspec.json.encode(given.choice).decode())
    if given.grammar is not None:
        found["grammar"] = Constraint(ConstraintKind.GRAMMAR, given.grammar)
    return [GivenConstraint(prefix + name, constraint) for name, constraint in found.items()]


def _json(schema: str | dict[str, object]) -> Constraint:
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Constraint(ConstraintKind.JSON, text)
