"""Requests leave no reference cycles: a garbage collection of many stops all streams for tens of milliseconds."""

import gc

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import Gate, ScriptedService
from twofold.serving.gateway.server import BoundedProtocol
from twofold.serving.gateway.streaming import EventStream, RunningChoices

ASK = {"model": "tiny", "prompt": "The", "max_tokens": 3}
OURS = (BoundedProtocol, EventStream, RunningChoices)


@pytest.fixture
def left():
    """Return a function that returns the types of the objects of requests that only a collection would free."""
    gc.collect()
    gc.disable()
    before = {id(each) for each in gc.get_objects()}
    yield lambda: [type(each) for each in gc.get_objects() if id(each) not in before and issubclass(type(each), OURS)]
    gc.enable()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_complete_responses_leave_none(left, path, stream):
    ask = {**ASK, "stream": stream, "messages": [{"role": "user", "content": "The"}]}
    with running_gateway(ScriptedService()) as client:
        for _ in range(3):
            assert client.post(path, json=ask).status_code == 200
    assert left() == []


def test_disconnected_clients_leave_none(left):
    gate = Gate()
    service = ScriptedService(lambda _: [5, gate, 6])
    with running_gateway(service) as client:
        with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
            next(response.iter_bytes())
        service.wait_until(lambda seen: seen.aborted)
        gate.open()
    assert left() == []
