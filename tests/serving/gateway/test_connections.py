"""Many connections, and several requests on one connection."""

import json
import resource
import socket
from contextlib import ExitStack

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


def test_the_limit_leaves_files_in_reserve():
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connection_limit(1) < files
    assert connection_limit(2) <= connection_limit(1) // 2 + 1
