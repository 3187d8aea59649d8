"""Parsing of server addresses from the command line."""

import pytest

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.serving.upstream.config import parse_servers


def test_parses_servers():
    """A server is configured by its URL, with or without the endpoints of its KV events."""
    one, two = parse_servers(Role.PREFILL, ["http://a:8000/v1/", "https://b,events=tcp://b:5557, replay=tcp://b:5558"])
    assert (one.instance, one.role, one.url, one.events) == ("prefill-0", Role.PREFILL, "http://a:8000", None)
    assert (two.url, two.events, two.replay) == ("https://b", "tcp://b:5557", "tcp://b:5558")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a:8000", "is not the address of a server"),
        ("http://", "is not the address of a server"),
        ("http://a,event=tcp://a:1", "events=tcp://HOST:PORT"),
        ("http://a,events=a:1", "events=tcp://HOST:PORT"),
        ("http://a,events=tcp://*:1", "events=tcp://HOST:PORT"),
        ("http://a,replay=tcp://a:1", "needs the address of events"),
    ],
)
def test_rejects_malformed_servers(text, says):
    with pytest.raises(ConfigurationError, match=says):
        parse_servers(Role.DECODE, [text])
