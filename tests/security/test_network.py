"""Network addresses of hosts: parsing, resolution and validation."""

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
def test_parses_names_and_addresses(text, host, port):
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
def test_rejects_invalid_addresses(text):
    with pytest.raises(ConfigurationError, match=r"--flag .* write tcp://ADDRESS:PORT"):
        TcpEndpoint.parse(text, "--flag")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])  # noqa: S104  (they are refused)
def test_rejects_wildcard_addresses(host):
    with pytest.raises(ConfigurationError, match="is a wildcard"):
        own_host(host, "--listen-workers")


def test_resolves_names_to_addresses():
    assert own_host("localhost", "--listen-workers") in {"127.0.0.1", "[::1]"}
    assert own_host("127.0.0.1", "--listen-workers") == "127.0.0.1"
    with pytest.raises(ConfigurationError, match=r"cannot resolve --address no\.such\.host\.invalid"):
        own_host("no.such.host.invalid", "--address")


def test_own_address_is_the_source_address_of_the_route():
    assert TcpEndpoint("127.0.0.1", 7600).own_address() == "127.0.0.1"
    with pytest.raises(ConfigurationError, match=r"no route to tcp://no\.such\.host\.invalid"):
        TcpEndpoint("no.such.host.invalid", 7600).own_address()
