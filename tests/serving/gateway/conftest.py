"""A gateway on a socket, in front of a stub service that returns scripted tokens."""

import json

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService


@pytest.fixture(scope="module")
def client():
    """Yield a client of a gateway with a stub service."""
    with running_gateway(ScriptedService()) as client:
        yield client


@pytest.fixture
def complete(client):
    """Return a function that requests a completion with the given fields; model and prompt have defaults."""

    def ask(**fields):
        return client.post("/v1/completions", json={"model": "tiny", "prompt": "The fox", **fields})

    return ask


@pytest.fixture
def chat(client):
    """Return a function that requests a chat completion with the given fields; model and messages have defaults."""
    message = {"role": "user", "content": "Hello"}

    def ask(**fields):
        return client.post("/v1/chat/completions", json={"model": "tiny", "messages": [message], **fields})

    return ask


@pytest.fixture
def events():
    """Return a function that reads the events of a streamed response."""

    def read(response):
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        data = [line.removeprefix("data: ") for line in lines]
        return [each if each == "[DONE]" else json.loads(each) for each in data]

    return read
