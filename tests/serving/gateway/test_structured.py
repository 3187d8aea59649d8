"""Constraints in requests: their forms, and what is refused."""

import asyncio
import json
import threading

import pytest

from serving.gateway.test_validation import refused
from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService
from support.structured import CONSTRAINTS, FIELDS, PERSON
from support.tokenizers_for_tests import byte_level
from twofold.engine.grammar import GrammarMatchers
from twofold.request import Constraint, ConstraintKind
from twofold.serving.gateway.gateway import Gateway, RequestLimits
from twofold.serving.gateway.structured import GivenConstraint, check_constraint

ANY_OBJECT = Constraint(ConstraintKind.JSON, '{"type":"object"}')


def ask(client, **fields):
    return client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 4, **fields})


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, CONSTRAINTS["json"]),
        ({"guided_regex": "a*"}, Constraint(ConstraintKind.REGEX, "a*")),
        ({"guided_grammar": 'root ::= "a"'}, Constraint(ConstraintKind.GRAMMAR, 'root ::= "a"')),
        ({"guided_choice": ["a", "b"]}, Constraint(ConstraintKind.CHOICE, '["a","b"]')),
        ({"response_format": None, "structured_outputs": {}, "guided_json": None}, None),
    ],
)
def test_every_form_reaches_the_service(fields, wanted):
    service = ScriptedService()
    with running_gateway(service) as client:
        assert ask(client, **fields).status_code == 200
    assert service.started[0].sampling.constraint == wanted


def test_a_schema_may_be_an_object():
    service = ScriptedService()
    with running_gateway(service) as client:
        ask(client, **FIELDS["json"])
        ask(client, guided_json=PERSON)
    for generation in service.started:
        assert json.loads(generation.sampling.constraint.text) == PERSON


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "response_format"),
        ({"structured_outputs": {"json": {"type": "thing"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_wrong_constraints_are_refused(fields, param):
    with running_gateway(ScriptedService()) as client:
        error = refused(ask(client, **fields), param=param)
    assert len(error["message"]) < 500


def test_without_a_tokenizer_outputs_cannot_be_constrained():
    with running_gateway(ScriptedService(), tokenizer=False) as client:
        answer = client.post(
            "/v1/completions", json={"model": "tiny", "prompt": [5], "max_tokens": 4, "guided_regex": "a"}
        )
    assert refused(answer, param="guided_regex")["code"] == "unsupported_parameter"


def test_a_request_that_leaves_does_not_end_the_compilation():
    """Requests with the same constraint share one compilation, and one of them may be cancelled."""
    tokenizer = byte_level()
    held = threading.Event()

    def read():
        held.wait()
        return tokenizer.backend.to_str()

    grammars = GrammarMatchers(read, tokenizer.backend.get_vocab_size(), ())
    gateway = Gateway(service=ScriptedService(), tokenizer=tokenizer, limits=RequestLimits(), grammars=grammars)
    first, second = (GivenConstraint("guided_regex", Constraint(ConstraintKind.REGEX, text)) for text in ("a", "b"))

    async def check():
        others = [asyncio.create_task(check_constraint(gateway, each)) for each in (first, second, second)]
        await asyncio.sleep(0)
        others[1].cancel()  # the first compilation runs, and the second waits for it
        await asyncio.wait([others[1]])
        held.set()
        await asyncio.gather(others[0], others[2])

    asyncio.run(check())
