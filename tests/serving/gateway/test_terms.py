"""Priority, timeout, rejection and cache retention of requests."""

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
    """Return the time from a request's arrival to its deadline, in seconds."""
    return pytest.approx(generation.deadline_s - generation.request.arrival_s)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize(
    ("fields", "header", "seconds"),
    [({}, None, 600), ({"timeout": 5}, None, 5), ({}, "7.5", 7.5), ({"timeout": 9}, "8", 8), ({"timeout": 8}, "9", 8)],
)
def test_timeout_from_field_and_header(client, service, path, body, fields, header, seconds):
    """If a request has a timeout field and a timeout header, the shorter timeout applies."""
    headers = {} if header is None else {"X-Request-Timeout": header}
    assert client.post(path, json={**body, **fields}, headers=headers).status_code == 200
    assert left(service.started[-1]) == seconds


@pytest.mark.parametrize("priority", [None, -3, 7])
def test_priority_field(client, service, priority):
    """The default priority is 0, as in vLLM."""
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
def test_rejects_invalid_timeouts_and_priorities(client, fields, header, param):
    """The 400 response names the invalid field or header."""
    headers = {} if header is None else {"X-Request-Timeout": header}
    response = client.post("/v1/completions", json={**ASK, **fields}, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("n", [1, 2])
def test_timeout_before_the_first_token_is_504(n):
    service = ScriptedService(lambda _: [Gate()])
    with running_gateway(service) as client:
        response = client.post("/v1/completions", json={**ASK, "n": n, "timeout": 0.05})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        service.wait_until(lambda service: len(service.aborted) == n)


def test_timeout_within_a_stream_ends_with_an_error_event(events):
    service = ScriptedService(lambda _: [40, 41, Gate()])
    with running_gateway(service) as client:
        body = {**ASK, "max_tokens": 9, "stream": True, "timeout": 0.5}
        *tokens, last = events(client.post("/v1/completions", json=body))
        assert len(tokens) == 2
        assert last["error"]["code"] == "deadline_exceeded"
        service.wait_until(lambda service: len(service.aborted) == 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", [reason for reason in RefusalReason if reason is not RefusalReason.BEYOND_SLO])
def test_rejection_is_429_with_retry_after(stream, reason):
    service = ScriptedService(lambda _: [rejection_error(Refusal(reason, 17))])
    with running_gateway(service) as client:
        response = client.post("/v1/completions", json={**ASK, "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (429, "17")
    error = response.json()["error"]
    assert error["type"] == "rate_limit_error"
    assert error["code"] == reason.replace("-", "_")
    assert "17 s" in error["message"]


def test_permanent_rejection_is_400_without_retry_after():
    service = ScriptedService(lambda _: [rejection_error(Refusal(RefusalReason.BEYOND_SLO, 17))])
    with running_gateway(service) as client:
        response = client.post("/v1/completions", json=ASK)
    assert response.status_code == 400
    assert "retry-after" not in response.headers
    assert response.json()["error"]["code"] == "beyond_slo"


def test_every_refusal_reason_has_a_message():
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
def test_cache_retention_is_capped(client, service, path, body, fields, seconds):
    assert client.post(path, json=body | fields).status_code == 200
    assert service.started[-1].request.retain_s == seconds


@pytest.mark.parametrize(("fields", "session"), [({}, ""), ({"prompt_cache_key": "mine"}, " mine")])
def test_a_cache_key_names_a_session(client, service, fields, session):
    assert client.post("/v1/chat/completions", json=CHAT | fields).status_code == 200
    assert service.started[-1].request.session == session
