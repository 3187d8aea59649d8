"""The gateway's paths, request ids, errors and body limit."""

import json
import re

import httpx
import pytest

import twofold
from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService
from twofold.serving.gateway.gateway import RequestLimits

ASK = {"model": "tiny", "prompt": "The", "max_tokens": 1}


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v1/models/", "/v1/completions/"])
def test_unknown_paths_are_404(client, path):
    response = client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("POST", "/v1/models"), ("PUT", "/health")])
def test_wrong_methods_are_405(client, method, path):
    """The Allow header of the response names the supported methods."""
    response = client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"]
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_lists_the_served_model(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert client.get("/v1/models/tiny").json() == card


def test_serves_a_page_of_the_api(client):
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in page.text


def test_serves_metrics_and_version(client):
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "scripted_requests_total" in metrics.text
    assert client.get("/version").json() == {"version": twofold.__version__}


def test_health_follows_the_service():
    """The status is 200 when the service is ready, else 503."""
    service = ScriptedService()
    with running_gateway(service) as client:
        assert [client.get(path).status_code for path in ("/health", "/ping")] == [200, 200]
        service.is_ready = False
        assert [client.get(path).status_code for path in ("/health", "/ping")] == [503, 503]


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/nothing"])
def test_echoes_safe_request_ids(client, path):
    """Empty, long or otherwise unsafe request ids are replaced by new ones."""
    given = client.post(path, json=ASK, headers={"x-request-id": "my-id.1"})
    assert given.headers["x-request-id"] == "my-id.1"
    ids = {
        client.post(path, json=ASK, headers={"x-request-id": bad}).headers["x-request-id"]
        for bad in ("", "a b", "x" * 129)
    }
    assert len(ids) == 3
    assert all(len(each) == 32 for each in ids)


def test_continues_the_clients_trace(client):
    """A request with a traceparent header continues its trace; other requests start a new one."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    given = client.post("/v1/completions", json=ASK, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    assert re.fullmatch(rf"00-{trace}-(?!b7ad6b7169203331)[0-9a-f]{{16}}-01", given.headers["traceparent"])
    new = client.post("/v1/completions", json=ASK).headers["traceparent"]
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", new)


def test_answer_id_contains_the_request_id():
    """Two requests with the same id get the same answer id, but different ids inside the service."""
    service = ScriptedService()
    with running_gateway(service) as client:
        for _ in range(2):
            answer = client.post("/v1/completions", json={**ASK, "n": 2}, headers={"x-request-id": "same"})
            assert answer.json()["id"] == "cmpl-same"
    assert len({generation.request.id for generation in service.started}) == 4


def test_rejects_large_bodies():
    with running_gateway(ScriptedService(), limits=RequestLimits(body_bytes=1000)) as client:
        big = b'{"model": "tiny", "prompt": "' + b"a" * 2000 + b'"}'
        for content in (big, iter([big[:500], big[500:1500], big[1500:]])):
            response = client.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        assert client.post("/v1/completions", json=ASK).status_code == 200


def test_unexpected_errors_are_500_and_logged(caplog):
    """The gateway continues to serve requests after an unexpected error."""
    service = ScriptedService()
    service.metrics = lambda: 1 / 0
    with running_gateway(service) as client:
        response = client.get("/metrics", headers={"x-request-id": "mine"})
        assert client.get("/health").status_code == 200
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert response.json()["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text


def test_concurrent_streams_do_not_mix():
    with running_gateway(ScriptedService(delay_s=0.001)) as client:
        body = {"model": "tiny", "prompt": "The", "max_tokens": 20, "seed": 4}
        alone = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with httpx.Client(base_url=client.base_url, timeout=600) as other:
            streams = [open_stream(each, body) for each in (client, other) * 5]
            assert {"".join(texts(stream)) for stream in streams} == {alone}


def open_stream(client, body):
    request = client.build_request("POST", "/v1/completions", json={**body, "stream": True})
    return client.send(request, stream=True)


def texts(response):
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    response.close()
