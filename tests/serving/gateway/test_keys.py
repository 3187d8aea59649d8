"""API keys: who is let in, under which name, and that the key itself is nowhere to be seen."""

import logging

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService
from twofold.errors import ConfigurationError
from twofold.scheduling.admission.limits import KeyLimits
from twofold.serving.gateway.keys import ApiKey, KeyRing, read_keys
from twofold.serving.launch.local_service import HttpConfig

ASK = {"model": "tiny", "prompt": "The", "max_tokens": 1}
SECRET = "sk-very-secret"  # noqa: S105 that it is one is the point
RING = KeyRing([ApiKey("alice", SECRET), ApiKey("bob", "other", KeyLimits(max_concurrent=2))])


@pytest.fixture(scope="module")
def service():
    return ScriptedService()


@pytest.fixture(scope="module")
def guarded(service):
    with running_gateway(service, keys=RING) as client:
        yield client


@pytest.mark.parametrize(
    "header", [None, SECRET, "Bearer wrong", "Basic sk-very-secret", "Bearer", "Bearer sécret".encode()]
)
def test_wrong_keys(guarded, header):
    """Everything under /v1 needs a key; a wrong one is not told from none."""
    headers = {} if header is None else {"authorization": header}
    for response in (
        guarded.post("/v1/completions", json=ASK, headers=headers),
        guarded.get("/v1/models", headers=headers),
    ):
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("header", "name"),
    [(f"Bearer {SECRET}", "alice"), (f"bearer {SECRET}", "alice"), ("Bearer other", "bob")],
)
def test_right_keys(guarded, service, header, name):
    """The name of the key goes with the generation."""
    response = guarded.post("/v1/completions", json=ASK, headers={"authorization": header})
    assert response.status_code == 200
    assert service.started[-1].key == name


def test_what_operators_ask_for_needs_no_key(guarded):
    """Health and metrics are for probes that carry none."""
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/metrics").status_code == 200


def test_without_keys_nobody_has_a_name(client):
    """A key that nobody asked for is ignored."""
    assert client.post("/v1/completions", json=ASK, headers={"authorization": "Bearer x"}).status_code == 200


def test_more_at_once_than_the_key_may_ever_have(guarded):
    """To come again later would not help, so it is a 400."""
    response = guarded.post(
        "/v1/completions", json={**ASK, "n": 3}, headers={"authorization": "Bearer other"}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_the_secret_is_nowhere(guarded, service, caplog):
    """Not in the log, not in an error, not in /metrics, not in what Python shows of the objects."""
    caplog.set_level(logging.DEBUG)
    right = {"authorization": f"Bearer {SECRET}"}
    said = [
        guarded.post("/v1/completions", json=ASK, headers=right).text,
        guarded.post("/v1/completions", json={**ASK, "n": 0}, headers=right).text,
        guarded.post("/v1/completions", json=ASK, headers={"authorization": f"Bearer {SECRET}x"}).text,
        guarded.get("/metrics").text,
        caplog.text,
        repr(service.started[-1]),
        repr(RING),
        repr(RING._keys),
        repr(HttpConfig(served_model_name="tiny", keys=RING)),
    ]
    assert not [each for each in said if SECRET in each]
    assert not any(SECRET in str(getattr(key, field)) for key in RING._keys for field in ApiKey.__slots__)


@pytest.fixture
def keys_file(tmp_path):
    def write(text):
        path = tmp_path / "keys.txt"
        path.write_text(text)
        return path

    return write


def test_a_file_of_keys(keys_file):
    """Limits may be left out, or be none; comments and empty lines are skipped; flags come first."""
    path = keys_file("# who  key\n\nalice sk-1\nbob\tsk-2 4\ncarol sk-3 - 60\n")
    ring = read_keys([SECRET], path)
    assert ring.limits == {
        "key-1": KeyLimits(),
        "alice": KeyLimits(),
        "bob": KeyLimits(max_concurrent=4),
        "carol": KeyLimits(requests_per_minute=60),
    }
    assert ring.find("Bearer sk-3").name == "carol"


def test_no_keys_at_all():
    """Then nobody is asked for one."""
    assert read_keys([], None) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no key in it"),
        ("alice", ":1: expected"),
        ("\nalice topsecret 1 2 3", ":2: expected"),
        ("al/ice topsecret", ":1: expected"),
        ("alice topsecret 0", "positive number"),
        ("alice topsecret 1.5", "positive number"),
        ("alice topsecret\nalice sk-2", "name 'alice' already"),
        ("alice topsecret\nbob topsecret", "the same key"),
        ("alice topsécret", "printable ASCII"),
    ],
)
def test_a_wrong_file(keys_file, text, said):
    """One sentence with file and line, and never the key."""
    path = keys_file(text)
    with pytest.raises(ConfigurationError, match=said) as refused:
        read_keys([], path)
    assert "secret" not in str(refused.value)


def test_a_missing_file(tmp_path):
    """Said by name."""
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_keys([], tmp_path / "nowhere")


@pytest.mark.parametrize("secret", ["", "two words", "sécret"])
def test_a_key_no_header_can_carry(secret):
    """Refused at the start, not with the first request."""
    with pytest.raises(ConfigurationError, match="printable ASCII"):
        read_keys([secret], None)
