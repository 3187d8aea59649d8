"""Priority and timeout: where they may be said, and what goes with the generation."""

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import Gate, ScriptedService
from twofold.errors import RequestError
from twofold.scheduling.admission.limits import Refusal, RefusalReason
from twofold.serving.controller.live_request import rejection_error
from twofold.serving.gateway.gateway import RequestLimits

ASK = {"model": "tiny", "prompt": "The", "max_tokens": 1}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def service():
    return ScriptedService()


@pytest.fixture(scope="module")
def client(service):
    with running_gateway(service, limits=RequestLimits(timeout_s=600, longest_timeout_s=900)) as client:
        yield client


def left(generation):
    """Seconds between arrival and deadline."""
    return pytest.approx(generation.deadline_s - generation.request.arrival_s)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize(
    ("fields", "header", "seconds"),
    [
        ({}, None, 600),
        ({"timeout": 5}, None, 5),
        ({}, "7.5", 7.5),
        ({"timeout": 9}, "8", 8),
        ({"timeout": 8}, "9", 8),
    ],
)
def test_timeouts(client, service, path, body, fields, header, seconds):
    """The field, the header or the shorter of both; without either the service's own."""
    headers = {} if header is None else {"X-Request-Timeout": header}
    assert client.post(path, json={**body, **fields}, headers=headers).status_code == 200
    assert left(service.started[-1]) == seconds


@pytest.mark.parametrize("priority", [None, -3, 7])
def test_priority(client, service, priority):
    """vLLM's field; none is 0."""
    assert client.post("/v1/completions", json={**ASK, "priority": priority}).status_code == 200
    assert service.started[-1].priority == (priority or 0)


@pytest.mark.parametrize(
    ("fields", "header", "param"),
    [
        ({"timeout": 0}, None, "timeout"),
        ({"timeout": "5"}, None, "timeout"),
        ({"timeout": 901}, None, "timeout"),
        ({"priority": 1.5}, None, "priority"),
        ({}, "soon", "X-Request-Timeout"),
        ({}, "nan", "X-Request-Timeout"),
        ({}, "-1", "X-Request-Timeout"),
        ({}, "inf", "X-Request-Timeout"),
        ({}, "1e9", "X-Request-Timeout"),
    ],
)
def test_wrong_terms(client, fields, header, param):
    """A 400 that names the field or the header."""
    headers = {} if header is None else {"X-Request-Timeout": header}
    response = client.post("/v1/completions", json={**ASK, **fields}, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("n", [1, 2])
def test_time_over_before_the_first_token(n):
    """A 504, and the generations are aborted."""
    service = ScriptedService(lambda _: [Gate()])
    with running_gateway(service) as client:
        response = client.post("/v1/completions", json={**ASK, "n": n, "timeout": 0.05})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        service.wait_until(lambda service: len(service.aborted) == n)


def test_time_over_in_the_middle_of_a_stream(events):
    """The tokens that were in time come, then an error event, and no `[DONE]`."""
    service = ScriptedService(lambda _: [40, 41, Gate()])
    with running_gateway(service) as client:
        body = {**ASK, "max_tokens": 9, "stream": True, "timeout": 0.5}
        *tokens, last = events(client.post("/v1/completions", json=body))
        assert len(tokens) == 2
        assert last["error"]["code"] == "deadline_exceeded"
        service.wait_until(lambda service: len(service.aborted) == 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "reason", [reason for reason in RefusalReason if reason is not RefusalReason.BEYOND_SLO]
)
def test_refused(stream, reason):
    """A 429 in OpenAI's form whose Retry-After is the one computed."""
    service = ScriptedService(lambda _: [rejection_error(Refusal(reason, 17))])
    with running_gateway(service) as client:
        response = client.post("/v1/completions", json={**ASK, "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (429, "17")
    error = response.json()["error"]
    assert error["type"] == "rate_limit_error"
    assert error["code"] == reason.replace("-", "_")
    assert "17 s" in error["message"]


def test_refused_for_good():
    """What no wait would help is a 400, and promises nothing."""
    service = ScriptedService(lambda _: [rejection_error(Refusal(RefusalReason.BEYOND_SLO, 17))])
    with running_gateway(service) as client:
        response = client.post("/v1/completions", json=ASK)
    assert response.status_code == 400
    assert "retry-after" not in response.headers
    assert response.json()["error"]["code"] == "beyond_slo"


def test_every_reason_has_a_sentence():
    """A new reason without one would be a KeyError in the middle of overload."""
    assert all(isinstance(rejection_error(Refusal(reason, 1)), RequestError) for reason in RefusalReason)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"prompt_cache_key": "a conversation"}, 0),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "in-memory"}, 0),
        ({"prompt_cache_retention": "24h"}, 3600),
        ({"prompt_cache_options": {}}, 0),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, 1800),
        ({"prompt_cache_options": {"ttl": "90s"}, "prompt_cache_retention": "in_memory"}, 90),
        ({"prompt_cache_options": {"ttl": "2h"}}, 3600),
    ],
)
def test_how_long_a_prompt_is_to_be_kept(client, service, path, body, fields, seconds):
    """As long as is asked for, and not longer than may be."""
    assert client.post(path, json=body | fields).status_code == 200
    assert service.started[-1].request.retain_s == seconds
