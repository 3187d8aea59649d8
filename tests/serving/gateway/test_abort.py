"""Clients that leave: every generation behind them is aborted, whenever it happens."""

import json
import socket

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import Gate, ScriptedService


def send(client, **fields):
    """Ask on a bare socket, which can be closed at any moment."""
    body = json.dumps({"model": "tiny", "prompt": "The", "max_tokens": 100, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    sock = socket.create_connection((client.base_url.host, client.base_url.port), timeout=120)
    sock.sendall(head + body)
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens", [0, 5])
def test_leaving(stream, n, tokens, caplog):
    """Before the first token and after some, streaming or not, one choice or several: no error is logged."""
    service = ScriptedService(lambda _: [*[5] * tokens, Gate()])
    with running_gateway(service) as client:
        sock = send(client, stream=stream, n=n)
        service.wait_until(lambda service: len(service.started) == n)
        if stream and tokens:
            received = b""
            while received.count(b"data: ") < n * tokens:
                received += sock.recv(65536)
        sock.close()
        service.wait_until(lambda service: len(service.aborted) == n)
        assert client.get("/health").status_code == 200
    assert service.finished == []
    assert caplog.records == []


def test_leaving_in_the_middle_of_the_body(caplog):
    """A client that leaves before it has asked starts nothing, and leaves no error in the log."""
    service = ScriptedService()
    with running_gateway(service) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert client.get("/health").status_code == 200
    assert service.started == []
    assert caplog.records == []


def test_one_choice_that_fails_ends_the_others():
    """With several choices, the failure of one aborts the rest."""

    def script(generation):
        return [OSError("broken")] if generation.request.id.split("-")[-2] == "1" else [Gate()]

    service = ScriptedService(script)
    with running_gateway(service) as client:
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "The", "n": 3})
        assert answer.status_code == 500
        service.wait_until(lambda service: len(service.aborted) == 3)


def test_the_first_token_is_not_kept_waiting():
    """The first token reaches the client while the second is still to come."""
    gate = Gate()
    service = ScriptedService(lambda _: [40, gate, 41])
    with running_gateway(service) as client:
        body = {"model": "tiny", "prompt": "The", "max_tokens": 2, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["finish_reason"] is None
            gate.open()
            assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_a_server_that_stops_ends_its_answers():
    """When the grace of stopping is over, running answers are cancelled and their generations aborted."""
    service = ScriptedService(lambda _: [5, Gate()])
    with running_gateway(service) as client:
        sock = send(client, stream=True)
        assert sock.recv(10)
    assert len(service.aborted) == 1
    sock.close()
