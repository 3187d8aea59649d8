"""Tests of `twofold route`."""

import json
from functools import partial

import pytest

from twofold.cli.serve import route_run
from twofold.cli.serve.route_settings import RouteSettings
from twofold.errors import ModelError
from twofold.instance import Role

PREFILL = ("--prefill", "http://a:8000")
DECODE = ("--decode", "http://b:8000")


@pytest.fixture
def refusal(refused, model):
    """Return a function that runs `twofold route` with invalid flags and returns its error message."""
    return partial(refused, "route", "--model", model)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "a phase has no server"),
        (PREFILL, "a phase has no server"),
        ((*DECODE, "--colocated", "http://c"), "a phase has no server"),
        ((*PREFILL, "--decode", "http://a:8000/v1"), "http://a:8000 is given twice"),
        ((*PREFILL, "--decode", "b:8000"), "'b:8000' is not the address of a server"),
        ((*PREFILL, *DECODE, "--router", "best"), "--router 'best' is unknown"),
        ((*PREFILL, *DECODE, "--router", "conductor"), "http://a:8000,events=tcp://HOST:5557"),
        ((*PREFILL, *DECODE, "--overload", "predicted"), "choose one of none, early"),
        ((*PREFILL, *DECODE, "--overload", "early"), "--router jsq does not"),
        ((*PREFILL, *DECODE, "--overload", "early", "--router", "load"), "needs --slo"),
        ((*PREFILL, *DECODE, "--overload", "early", "--router", "load", "--slo", "tpot=1"), "needs --slo"),
        ((*PREFILL, *DECODE, "--log-format", "xml"), "--log-format 'xml' is unknown"),
        ((*PREFILL, *DECODE, "--host", "::"), "lets other machines in"),
        ((*PREFILL, *DECODE, "--model", "/nowhere"), "there is no model directory /nowhere"),
        ((*PREFILL, *DECODE, "--max-body-bytes", "much"), "is not a size"),
    ],
)
def test_mistakes(refusal, arguments, says):
    """The error names the invalid or missing flag."""
    assert says in refusal(*arguments)


def test_flags_become_servers_and_api_key(model, monkeypatch):
    monkeypatch.setenv("TWOFOLD_SERVER_API_KEY", "secret")
    flags = RouteSettings(model=str(model), prefill=("http://a",), decode=("http://b", "http://c"))
    config = route_run.route_config(flags)
    assert [(server.instance, server.role) for server in config.servers] == [
        ("prefill-0", Role.PREFILL),
        ("decode-0", Role.DECODE),
        ("decode-1", Role.DECODE),
    ]
    assert config.api_key == "secret"
    assert "TWOFOLD_SERVER_API_KEY" not in route_run.os.environ
    assert config.vocab_size == 512


@pytest.mark.parametrize("config", [{}, {"vocab_size": -3}, {"vocab_size": "many"}])
def test_a_model_without_a_vocabulary_size(tmp_path, config):
    """A config.json without a valid `vocab_size` raises ModelError."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="vocab_size"):
        route_run.route_config(RouteSettings(model=str(tmp_path), colocated=("http://a",)))


def test_the_vocabulary_of_a_model_with_parts(tmp_path):
    """The vocabulary size and the context length of a multimodal model come from its `text_config`."""
    text = {"vocab_size": 7, "max_position_embeddings": 99}
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 5, "text_config": text}))
    config = route_run.route_config(RouteSettings(model=str(tmp_path), colocated=("http://a",)))
    assert (config.vocab_size, config.context) == (7, 99)
