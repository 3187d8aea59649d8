"""Constraints: allowed tokens along an output, and constraints that cannot be compiled."""

import json
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.structured import CONSTRAINTS, PERSON, matches
from support.tokenizers_for_tests import byte_fallback, byte_level
from twofold.engine.grammar import GrammarError, GrammarMatchers, allowed_tokens
from twofold.request import Constraint, ConstraintKind

TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}


def matchers(tokenizer):
    backend = tokenizer.backend
    return GrammarMatchers(backend.to_str, backend.get_vocab_size(), [backend.token_to_id("</s>")])


SHARED = {name: matchers(tokenizer()) for name, tokenizer in TOKENIZERS.items()}


def allowed_ids(grammars, name, constraint, output, vocabulary):
    return allowed_tokens(grammars.allowed(name, constraint, output), vocabulary).nonzero()[0].tolist()


def walk(grammars, tokenizer, constraint, seed):
    """Follow random allowed tokens to the end of the output, and return the output without EOS."""
    backend, draw, output = tokenizer.backend, np.random.default_rng(seed), []
    end = backend.token_to_id("</s>")
    while len(output) < 2000:
        ids = allowed_ids(grammars, f"{constraint.text} {seed}", constraint, output, backend.get_vocab_size())
        assert ids
        # Open strings and lists would rarely end.
        token = end if end in ids else int(draw.choice(ids))
        if token == end:
            return output
        output.append(token)
    raise AssertionError("the output does not end")


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", CONSTRAINTS)
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_outputs_match_their_constraint(name, tokenizer, seed):
    grammars, constraint = SHARED[tokenizer], CONSTRAINTS[name]
    output = walk(grammars, TOKENIZERS[tokenizer](), constraint, seed)
    text = TOKENIZERS[tokenizer]().decode(output, skip_special_tokens=True)
    assert matches(constraint, text), text


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_replayed_output_allows_the_same_tokens(name):
    """A worker that gets the whole output at once continues as the worker that generated it."""
    constraint, tokenizer = CONSTRAINTS[name], byte_level()
    output = walk(SHARED["byte level"], tokenizer, constraint, 1)
    vocabulary = tokenizer.backend.get_vocab_size()
    for made in range(len(output) + 1):
        stepwise = allowed_ids(SHARED["byte level"], f"{name} stepwise", constraint, output[:made], vocabulary)
        at_once = allowed_ids(SHARED["byte level"], f"{name} of {made}", constraint, output[:made], vocabulary)
        assert stepwise == at_once


def test_only_the_end_follows_a_complete_output():
    grammars, tokenizer = SHARED["byte level"], byte_level()
    constraint = Constraint(ConstraintKind.CHOICE, '["yes","no"]')
    end = tokenizer.backend.token_to_id("</s>")
    output = tokenizer.backend.encode("yes", add_special_tokens=False).ids
    for after in ([], [end], [end, end]):
        assert allowed_ids(grammars, "complete", constraint, [*output, *after], 400) == [end]


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (ConstraintKind.JSON, '{"type": "objec"}', "objec"),
        (ConstraintKind.JSON, "{", "EOF"),
        (ConstraintKind.JSON, '{"not": {"type": "string"}}', "not"),
        (ConstraintKind.REGEX, "([", "regex"),
        (ConstraintKind.GRAMMAR, "start: missing", "missing"),
        (ConstraintKind.GRAMMAR, "root ::= missing", "missing"),
        (ConstraintKind.REGEX, "(" * 2000 + "a" + "){100}" * 2000, "regex"),
    ],
)
def test_constraints_that_cannot_be_compiled_say_why(kind, text, says):
    with pytest.raises(GrammarError, match=re.escape(says)) as caught:
        SHARED["byte level"].compile(Constraint(kind, text)).result()
    assert len(str(caught.value)) <= 300


def test_a_grammar_that_becomes_too_complex_is_an_error():
    """Steps of a grammar have a limit, so one request cannot stall the others."""
    text = 'start: "a" | start start | start start start'
    constraint, tokenizer = Constraint(ConstraintKind.GRAMMAR, text), byte_level()
    (letter,) = tokenizer.backend.encode("a", add_special_tokens=False).ids
    with pytest.raises(GrammarError):
        SHARED["byte level"].allowed("ambiguous", constraint, [letter] * 3000)


def test_equal_constraints_are_compiled_once():
    grammars = matchers(byte_level())
    first = grammars.compile(CONSTRAINTS["json"])
    assert grammars.compile(Constraint(ConstraintKind.JSON, json.dumps(PERSON))) is first
    for number in range(100):
        grammars.compile(Constraint(ConstraintKind.CHOICE, f'["{number}"]')).result()
    assert grammars.compile(CONSTRAINTS["json"]) is not first, "old ones are dropped"


def test_the_schema_of_the_tests_rejects_other_objects():
    for wrong in ({}, {"name": "", "age": 1, "tags": []}, {"name": "a", "age": 1, "tags": [], "more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, PERSON)
