"""Rejected requests get OpenAI's error JSON with the name of the invalid field."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from twofold.serving.gateway.gateway import BodyReader, RequestLimits, read_struct
from twofold.serving.gateway.generations import server_fields
from twofold.serving.gateway.schemas import CompletionFields

BIG = 10**30


def refused(response, status=400, param=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    # The place may be inside the field, as in prompt[3].
    assert param is None or (error["param"] or "").startswith(param), error
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("best_of", value) for value in (0, "2", 129)],
        *[("echo", value) for value in (1, "true")],
        *[("max_tokens", value) for value in ("ten", True, 1.5, -1, 0, BIG, [1], {})],
        *[("n", value) for value in (0, -1, "2", 129, BIG)],
        *[("temperature", value) for value in (-0.1, 2.1, "1", True, 1e300)],
        *[("top_p", value) for value in (-0.1, 0, 1.1, "1")],
        *[("top_k", value) for value in (-2, 1.5, "1", BIG)],
        *[("min_p", value) for value in (-0.1, 1.1, "0", True)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, False, "1")],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, False, "1")],
        *[("repetition_penalty", value) for value in (0, -1, 101, True)],
        *[
            ("logit_bias", value)
            for value in ({"a": 1}, {"-1": 1}, {"401": 1}, {"9" * 5000: 1}, {"1": 101}, {"1": True}, {"1.5": 1}, [1])
        ],
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        *[("bad_words", value) for value in ("no", [1], [""], ["  "], ["a"] * 129, ["a" * 8193])],
        *[("seed", value) for value in ("1", 1.5, 2**63, True)],
        *[("logprobs", value) for value in (-1, 21, True, "1")],
        *[("min_tokens", value) for value in (-1, 17, "1")],
        *[("stream", value) for value in ("true", 1)],
        *[("stop", value) for value in (1, [1], "", [""], ["a"] * 17, "a" * 1025)],
        *[("stop_token_ids", value) for value in (1, ["a"], [-1], [401], [BIG], [5] * 1025)],
        ("ignore_eos", "yes"),
        *[("cache_salt", value) for value in (5, "")],
        *[("prompt_cache_key", value) for value in (5, "k" * 65)],
        *[("prompt_cache_retention", value) for value in ("12h", 24, "")],
        *[("prompt_cache_options", value) for value in ("30m", {"ttl": 30}, {"ttl": "30"}, {"ttl": "0m"})],
        ("prompt_cache_options", {"mode": "explicit"}),
        ("stream_options", {"include_usage": True}),
        ("prompt", None),
        *[("prompt", value) for value in ({}, 5, [], [[]], [401], [[1], [BIG]], [[401]], ["a", 1], [1, [1]])],
        *[("model", value) for value in (None, 5, [])],
    ],
)
def test_rejects_wrong_types_and_values(complete, field, value):
    refused(complete(**{field: value}), param=field)


@pytest.mark.parametrize(
    ("prompt", "param"), [([-1], "prompt[0]"), ([[1, -1]], "prompt[0][1]"), ([True], "prompt[0]"), ([1.5], "prompt[0]")]
)
def test_errors_name_the_place_within_a_list(complete, prompt, param):
    refused(complete(prompt=prompt), param=param)


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_rejects_missing_required_fields(client, missing):
    body = {"model": "tiny", "prompt": "a"}
    del body[missing]
    refused(client.post("/v1/completions", json=body), param=missing)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("audio", {"voice": "a"}),
        ("modalities", ["text", "audio"]),
    ],
)
def test_rejects_unsupported_fields(complete, chat, field, value):
    """Unsupported fields that would change the answer are rejected."""
    assert refused(complete(**{field: value}), param=field)["code"] == "unsupported_parameter"
    refused(chat(**{field: value}), param=field)


def test_accepts_neutral_values_of_unsupported_fields(complete, chat):
    neutral = {"length_penalty": 1, "echo": False, "suffix": None, "tools": [], "user": "me"}
    for ask in (complete, chat):
        answer = ask(**neutral, best_of=2, n=2, max_tokens=2, nonsense=[1])
        assert answer.status_code == 200, answer.text
    assert complete(max_tokens=None, temperature=None, stop=None, seed=None, n=None).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{'model': 1}",
        b'{"temperature": NaN}',
        b"\xff",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 50000,
        b'{"x":' + b"[" * 100000 + b"]" * 100000 + b"}",
    ],
    ids=range(9),
)
def test_rejects_malformed_json(client, body):
    refused(client.post("/v1/completions", content=body))


@pytest.mark.parametrize("body", [b"null", b"[]", b"1", b'"text"', b"true"])
def test_rejects_json_that_is_not_an_object(client, body):
    assert "object" in refused(client.post("/v1/chat/completions", content=body))["message"]


def test_an_unknown_model_is_404(complete, chat, client):
    for response in (complete(model="other"), chat(model="other"), client.get("/v1/models/other")):
        assert refused(response, 404, "model")["code"] == "model_not_found"


def test_rejects_requests_beyond_the_context(complete, chat):
    """The error for a request beyond the context length contains the token counts."""
    error = refused(complete(prompt=[5] * 200, max_tokens=57), param="max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("256", "200", "57", "257"))
    assert complete(prompt=[5] * 200, max_tokens=56).status_code == 200
    assert refused(complete(prompt=[5] * 256))["code"] == "context_length_exceeded"
    assert refused(complete(prompt="\u1234" * 20000))["code"] == "context_length_exceeded"
    assert refused(chat(max_tokens=256))["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hello", "messages"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "robot", "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "a"}], "messages"),  # rejected by this model's template
    ],
)
def test_rejects_invalid_messages(chat, messages, param):
    """The error for an invalid chat message names the message and its invalid part."""
    refused(chat(messages=messages), param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
def test_rejects_invalid_chat_fields(chat, fields, param):
    refused(chat(**fields), param=param)


def test_limits_the_number_of_generations(complete):
    """The number of prompts times `n` is limited."""
    refused(complete(prompt=[[1]] * 17, n=128), param="n")


@pytest.mark.parametrize(
    ("more", "passed"),
    [
        ({}, {}),
        ({"request_id": "mine"}, {}),
        ({"allowed_token_ids": [1]}, {"allowed_token_ids": [1]}),
        ({"vllm_xargs": {"a": 1}, "seed": 3}, {"vllm_xargs": {"a": 1}}),
    ],
)
def test_fields_that_only_servers_know_are_passed_on(more, passed):
    body = json.dumps({"model": "m", "prompt": "x", **more}).encode()
    request = Request({"type": "http", "headers": [], "state": {"whole_body": lambda: body}})
    fields = asyncio.run(read_struct(request, CompletionFields, BodyReader(RequestLimits(), keeps=True)))
    assert (fields.prompt, fields.seed) == ("x", more.get("seed"))
    found = server_fields(SimpleNamespace(forwarder=object()), request, fields)
    assert {name: json.loads(bytes(value)) for name, value in found.items()} == passed
