"""Addresses between hosts."""

import pytest

from twofold.errors import ConfigurationError
from twofold.security.network import TcpEndpoint, own_host


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://10.0.0.1:7600", "10.0.0.1", 7600),
        ("tcp://node-3:1", "node-3", 1),
        ("tcp://[fe80::1]:7600", "[fe80::1]", 7600),
    ],
)
def test_an_address_is_read_as_it_is_written(text, host, port):
    """By name, by number, and of either kind."""
    endpoint = TcpEndpoint.parse(text, "--flag")
    assert (endpoint.host, endpoint.port, str(endpoint)) == (host, port, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1:7600",
        "tcp://10.0.0.1",
        "tcp://:7600",
        "tcp://h:0",
        "tcp://h:70000",
        "tcp://h:1/x",
        "ipc://x",
        "tcp://fe80::1:7600",
    ],
)
def test_what_is_no_address_is_refused(text):
    """With the flag that it was given to, and what would be right."""
    with pytest.raises(ConfigurationError, match=r"--flag .* write tcp://ADDRESS:PORT"):
        TcpEndpoint.parse(text, "--flag")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])  # noqa: S104  (they are refused)
def test_an_address_that_means_every_one_is_refused(host):
    """Others are told it, and could not call it."""
    with pytest.raises(ConfigurationError, match="is a wildcard"):
        own_host(host, "--listen-workers")


def test_a_name_is_looked_up():
    """Sockets are bound to numbers, and others are told those."""
    assert own_host("localhost", "--listen-workers") in {"127.0.0.1", "[::1]"}
    assert own_host("127.0.0.1", "--listen-workers") == "127.0.0.1"
    with pytest.raises(ConfigurationError, match=r"cannot resolve --address no\.such\.host\.invalid"):
        own_host("no.such.host.invalid", "--address")


def test_ones_own_address_is_that_towards_the_other():
    """Over loopback, it is loopback's."""
    assert TcpEndpoint("127.0.0.1", 7600).own_address() == "127.0.0.1"
    with pytest.raises(ConfigurationError, match=r"no route to tcp://no\.such\.host\.invalid"):
        TcpEndpoint("no.such.host.invalid", 7600).own_address()
