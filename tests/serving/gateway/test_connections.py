"""Many connections, and several requests on one connection."""

import json
import resource
import socket
from contextlib import ExitStack, suppress

import httpx
import pytest

from support.running_gateway import running_gateway
from support.scripted_service import Gate, ScriptedService
from twofold.serving.gateway.gateway import RequestLimits
from twofold.serving.gateway.server import connection_limit

ASK = {"model": "tiny", "prompt": "The", "max_tokens": 9}


@pytest.fixture
def connect():
    """Return a function that opens a connection to a gateway and sends some bytes."""
    with ExitStack() as opened:

        def sending(client, data=b""):
            address = (client.base_url.host, client.base_url.port)
            sock = opened.enter_context(socket.create_connection(address, timeout=600))
            sock.sendall(data)
            return sock

        yield sending


def post(**fields):
    body = json.dumps(ASK | fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def test_the_oldest_idle_connections_give_way(connect, caplog):
    """A server with silent connections up to its limit answers new ones, and warns once."""
    with running_gateway(ScriptedService(), limits=RequestLimits(connections=5)) as client:
        silent = [connect(client) for _ in range(20)]
        for path in ("/health", "/metrics", "/v1/models"):
            assert client.get(path).status_code == 200
        assert silent[0].recv(10) == b""
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "all 5 connections are open" in caplog.text


def test_probes_are_answered_while_all_connections_are_busy(connect):
    """Other requests are refused until a connection is free."""
    gate = Gate()
    service = ScriptedService(lambda _: [5, gate, 6, 7, 8, 9, 10, 11, 12, 13])
    with running_gateway(service, limits=RequestLimits(connections=2)) as client:
        busy = [connect(client, post(stream=True)) for _ in range(2)]
        service.wait_until(lambda service: len(service.started) == 2)
        assert [client.get(path).status_code for path in ("/health", "/metrics")] == [200, 200]
        refused = client.post("/v1/completions", json=ASK)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert "retry-after" in refused.headers
        gate.open()
        for sock in busy:
            sock.close()
        while client.post("/v1/completions", json=ASK).status_code == 503:
            pass  # the server has not noticed the disconnects yet


def from_another_address(client):
    """Return an HTTP client of the same gateway with another address of this host."""
    return httpx.Client(base_url=client.base_url, transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=600)


def test_an_address_holds_no_more_than_its_share(connect):
    """Busy connections of one address take no place of another one."""
    gate = Gate()
    service = ScriptedService(lambda _: [5, gate, 6, 7, 8, 9, 10, 11, 12, 13])
    limits = RequestLimits(connections_per_address=2)
    with running_gateway(service, limits=limits) as client, from_another_address(client) as other:
        busy = [connect(client, post(stream=True)) for _ in range(2)]
        service.wait_until(lambda service: len(service.started) == 2)
        refused = client.post("/v1/completions", json=ASK)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert client.get("/health").status_code == 200
        assert other.get("/v1/models").status_code == 200
        gate.open()
        for sock in busy:
            sock.close()
        while client.post("/v1/completions", json=ASK).status_code == 503:
            pass  # the server has not noticed the disconnects yet


def test_silent_connections_give_way_to_those_of_their_address(connect, caplog):
    limits = RequestLimits(connections=8, connections_per_address=3)
    with running_gateway(ScriptedService(), limits=limits) as client, from_another_address(client) as other:
        assert other.get("/v1/models").status_code == 200
        kept = other._transport._pool.connections[0]
        silent = [connect(client) for _ in range(20)]
        assert client.get("/v1/models").status_code == 200
        assert silent[0].recv(10) == b""
        assert other.get("/v1/models").status_code == 200
        assert other._transport._pool.connections == [kept]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "all 3 connections of 127.0.0.1 are open" in caplog.text


def test_the_limit_leaves_files_in_reserve():
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connection_limit(1) < files
    assert connection_limit(2) <= connection_limit(1) // 2 + 1


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pipelined", [1, 3, 100])
def test_a_disconnect_behind_pipelined_requests_aborts_the_running_one(connect, stream, pipelined, caplog):
    service = ScriptedService(lambda _: [5, Gate()])
    with running_gateway(service) as client:
        sock = connect(client, post(stream=stream))
        service.wait_until(lambda service: len(service.started) == 1)
        sock.sendall(GET * pipelined)
        sock.close()
        service.wait_until(lambda service: len(service.aborted) == 1)
        assert client.get("/health").status_code == 200
    assert caplog.records == []


def test_a_large_body_behind_a_running_request_ends_the_connection(connect):
    """The server would have to pause reading, and not notice a disconnect."""
    service = ScriptedService(lambda _: [5, Gate()])
    with running_gateway(service) as client:
        sock = connect(client, post())
        service.wait_until(lambda service: len(service.started) == 1)
        with suppress(ConnectionError):
            sock.sendall(post(user="u" * 200_000))
        service.wait_until(lambda service: len(service.aborted) == 1)


def test_pipelined_requests_are_answered_in_order(connect):
    gate = Gate()
    service = ScriptedService(lambda _: [5, gate, *[6] * 8])
    with running_gateway(service) as client:
        sock = connect(client, post() + GET + GET.replace(b"health", b"nothing"))
        service.wait_until(lambda service: len(service.started) == 1)
        gate.open()
        answer = b""
        while answer.count(b"HTTP/1.1 ") < 3 or not answer.endswith(b"}}"):
            answer += sock.recv(65536)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]
