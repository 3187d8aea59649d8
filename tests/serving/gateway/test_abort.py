"""Abort of all generations of a request when its client disconnects."""

import json
import socket
import time

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import Gate, ScriptedService


def send(client, *, pause_s=0.0, **fields):
    """Send a completion request on a bare socket, which the test can close at any time.

    `pause_s` is the time after the first byte of the body.
    """
    body = json.dumps({"model": "tiny", "prompt": "The", "max_tokens": 100, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    sock = socket.create_connection((client.base_url.host, client.base_url.port), timeout=600)
    sock.sendall(head + body[:1])
    time.sleep(pause_s)
    sock.sendall(body[1:])
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens", [0, 5])
def test_a_disconnect_aborts_every_generation(stream, n, tokens, caplog):
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


@pytest.mark.parametrize("pause_s", [0.0, 0.3])  # the body arrives before the application asks for it, or after
def test_a_disconnect_behind_a_large_body_is_seen(pause_s):
    """uvicorn stops to read behind a body of 64 KiB, until the application takes it."""
    service = ScriptedService(lambda _: [Gate()])
    with running_gateway(service) as client:
        sock = send(client, stream=True, user="x" * 1_000_000, pause_s=pause_s)
        service.wait_until(lambda service: len(service.started) == 1)
        sock.close()
        service.wait_until(lambda service: len(service.aborted) == 1)


def test_a_disconnect_within_the_body_starts_nothing(caplog):
    service = ScriptedService()
    with running_gateway(service) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert client.get("/health").status_code == 200
    assert service.started == []
    assert caplog.records == []


def test_a_failed_choice_aborts_the_others():

    def script(generation):
        return [OSError("broken")] if generation.request.id.split("-")[-2] == "1" else [Gate()]

    service = ScriptedService(script)
    with running_gateway(service) as client:
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "The", "n": 3})
        assert answer.status_code == 500
        service.wait_until(lambda service: 2 <= len(service.started) == len(service.aborted))


def test_tokens_are_streamed_immediately():
    """The first token reaches the client before the second is generated."""
    gate = Gate()
    service = ScriptedService(lambda _: [40, gate, 41])
    with running_gateway(service) as client:
        body = {"model": "tiny", "prompt": "The", "max_tokens": 2, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["finish_reason"] is None
            gate.open()
            assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_stopping_the_server_aborts_running_answers():
    """Answers that still run after the grace period are aborted."""
    service = ScriptedService(lambda _: [5, Gate()])
    with running_gateway(service) as client:
        sock = send(client, stream=True)
        assert sock.recv(10)
    assert len(service.aborted) == 1
    sock.close()
