"""Clients that send slowly, or nothing."""

import json
import socket
from contextlib import contextmanager
from itertools import repeat

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService, served_model
from twofold.serving.gateway import streaming
from twofold.serving.gateway.gateway import RequestLimits

SOON = 0.05
LATER = 1.0  # in time for requests that are sent at once
ASK = {"model": "tiny", "prompt": "The", "max_tokens": 1}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def post(size):
    """Return the head of a request with a body of `size` bytes."""
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size


@contextmanager
def connection(client):
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=600) as sock:
        yield sock


def received(sock):
    """Return the bytes that arrive until the server closes the connection."""
    parts = []
    try:
        while data := sock.recv(65536):
            parts.append(data)
    except ConnectionResetError:
        pass  # the server has not read everything
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"\r\n"])
def test_closes_connections_without_a_head(sent):
    with running_gateway(ScriptedService(), limits=RequestLimits(head_s=SOON)) as client, connection(client) as sock:
        sock.sendall(sent)
        assert received(sock) == b""


@pytest.mark.parametrize("rest", [b"GET /health HT", b"\r\n"])
def test_closes_connections_without_a_second_head(rest):
    with running_gateway(ScriptedService(), limits=RequestLimits(head_s=LATER)) as client, connection(client) as sock:
        sock.sendall(HEALTH)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        sock.sendall(rest)
        received(sock)


def test_closes_connections_whose_second_head_begins_early():
    with running_gateway(ScriptedService(), limits=RequestLimits(head_s=LATER)) as client, connection(client) as sock:
        sock.sendall(HEALTH + b"GET /health HT")
        assert received(sock).count(b"HTTP/1.1 200") == 1


def test_answers_slow_bodies_with_a_timeout():
    """The connection is closed soon after the answer, as the rest of the body would be taken for a head."""
    service = ScriptedService()
    limits = RequestLimits(body_s=SOON, head_s=LATER)
    with running_gateway(service, limits=limits) as client, connection(client) as sock:
        sock.sendall(post(100) + b"{")
        answer = received(sock)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in answer
    assert service.started == []


def test_bodies_share_a_budget():
    """Another body is refused while the unfinished ones take the budget, and accepted after their end."""
    body = json.dumps(ASK | {"user": "u" * 300}).encode()
    with running_gateway(ScriptedService(), limits=RequestLimits(body_bytes=1000, bodies_bytes=1000)) as client:
        with connection(client) as sock:
            sock.sendall(post(900) + b" " * 800)
            while (refused := client.post("/v1/completions", content=body)).status_code == 200:
                pass  # the other body has not arrived yet
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert "limit of 1000 bytes" in refused.json()["error"]["message"]
        while (answer := client.post("/v1/completions", content=body)).status_code == 503:
            pass  # the server has not noticed the disconnect yet
        assert answer.status_code == 200


@pytest.mark.parametrize("terms", [{"timeout": 1}, {}])
def test_a_client_that_never_reads_is_ended(caplog, monkeypatch, terms):
    """At the deadline, or when much output waits, the generation is aborted and the connection closed."""
    monkeypatch.setattr(streaming, "LAST_SEND_S", 0.0)
    model = served_model(name="m" * 10_000, max_model_len=10**6)  # the name is in each event
    service = ScriptedService(lambda _: repeat(5), model=model, delay_s=0.001 if terms else 0.0)
    body = json.dumps(ASK | {"model": model.name, "stream": True, "max_tokens": 10**5, **terms}).encode()
    with running_gateway(service) as client, connection(client) as sock:
        sock.sendall(post(len(body)) + body)
        service.wait_until(lambda service: len(service.aborted) == 1)
        assert b"deadline_exceeded" not in received(sock)
    assert caplog.records == []
