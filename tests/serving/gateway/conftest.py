"""A gateway on a socket, in front of a scripted service."""

import json

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService


@pytest.fixture(scope="module")
def client():
    """A client of a gateway whose service improvises; for tests that leave nothing behind."""
    with running_gateway(ScriptedService()) as client:
        yield client


@pytest.fixture
def complete(client):
    """Ask for a completion with these fields; the model and a prompt are filled in."""

    def ask(**fields):
        return client.post("/v1/completions", json={"model": "tiny", "prompt": "The fox", **fields})

    return ask


@pytest.fixture
def chat(client):
    """Ask for a chat completion with these fields; the model and a message are filled in."""
    message = {"role": "user", "content": "Hello"}

    def ask(**fields):
        return client.post("/v1/chat/completions", json={"model": "tiny", "messages": [message], **fields})

    return ask


@pytest.fixture
def events():
    """The data of every event of a stream; the last is `[DONE]` where it ended well."""

    def read(response):
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        data = [line.removeprefix("data: ") for line in lines]
        return [each if each == "[DONE]" else json.loads(each) for each in data]

    return read
