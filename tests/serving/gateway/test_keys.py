"""API keys: authorization, key names, key files, and secrecy of the keys."""

import logging

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService
from twofold.errors import ConfigurationError
from twofold.scheduling.admission.limits import KeyLimits
from twofold.serving.gateway.app import GatewaySettings
from twofold.serving.gateway.keys import ApiKey, KeyRing, read_keys
from twofold.serving.launch.local_service import HttpConfig

ASK = {"model": "tiny", "prompt": "The", "max_tokens": 1}
SECRET = "sk-very-secret"  # noqa: S105 a fake secret
RING = KeyRing([ApiKey("alice", SECRET), ApiKey("bob", "other", KeyLimits(max_concurrent=2))])


@pytest.fixture(scope="module")
def service():
    return ScriptedService()


@pytest.fixture(scope="module")
def guarded(service):
    with running_gateway(service, keys=RING) as client:
        yield client


@pytest.mark.parametrize(
    "header",
    [
        *(None, SECRET, "Bearer wrong", "Basic sk-very-secret", "Bearer", "Bearer sécret".encode()),
        f"Bearer {SECRET}\xa0".encode("latin-1"),
    ],
)
def test_rejects_wrong_and_missing_keys_alike(guarded, header):
    """Wrong and missing keys get the same response on every path under /v1."""
    headers = {} if header is None else {"authorization": header}
    for response in (
        guarded.post("/v1/completions", json=ASK, headers=headers),
        guarded.get("/v1/models", headers=headers),
    ):
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("header", "name"), [(f"Bearer {SECRET}", "alice"), (f"bearer {SECRET}", "alice"), ("Bearer other", "bob")]
)
def test_the_key_name_is_passed_with_the_generation(guarded, service, header, name):
    response = guarded.post("/v1/completions", json=ASK, headers={"authorization": header})
    assert response.status_code == 200
    assert service.started[-1].key == name


def test_a_key_is_found_again_and_no_other():
    """The ring remembers the last valid header."""
    ring = KeyRing([ApiKey("alice", SECRET), ApiKey("bob", "other")])
    headers = [f"Bearer {SECRET}", f"Bearer {SECRET}", f"Bearer {SECRET}x", "Bearer other", "", f"bearer {SECRET}"]
    found = [key and key.name for key in map(ring.find, headers)]
    assert found == ["alice", "alice", None, "bob", None, "alice"]


def test_health_and_metrics_need_no_key(guarded):
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/metrics").status_code == 200


def test_keys_are_ignored_when_none_are_configured(client):
    assert client.post("/v1/completions", json=ASK, headers={"authorization": "Bearer x"}).status_code == 200


def test_more_generations_than_the_keys_limit_are_400(guarded):
    """A request whose `n` exceeds its API key's concurrency limit gets a 400."""
    response = guarded.post("/v1/completions", json={**ASK, "n": 3}, headers={"authorization": "Bearer other"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_the_secret_is_never_shown(guarded, service, caplog):
    """Logs, responses, /metrics and reprs do not contain an API key."""
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
        repr(HttpConfig(served_model_name="tiny", gateway=GatewaySettings(keys=RING))),
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


def test_reads_a_key_file(keys_file):
    """In a key file, limits are optional, and comments and empty lines are ignored."""
    path = keys_file("# who  key\n\nalice sk-1\nbob\tsk-2 4\ncarol sk-3 - 60\n")
    ring = read_keys([SECRET], path)
    assert ring.limits == {
        "key-1": KeyLimits(),
        "alice": KeyLimits(),
        "bob": KeyLimits(max_concurrent=4),
        "carol": KeyLimits(requests_per_minute=60),
    }
    assert ring.find("Bearer sk-3").name == "carol"


def test_no_keys_mean_no_key_ring():
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
        ("alice topsecret\nalice sk-2", "duplicate key name 'alice'"),
        ("alice topsecret\nbob topsecret", "duplicate key"),
        ("alice topsécret", "printable ASCII"),
    ],
)
def test_key_file_errors_name_the_line_and_hide_the_key(keys_file, text, said):
    path = keys_file(text)
    with pytest.raises(ConfigurationError, match=said) as refused:
        read_keys([], path)
    assert "secret" not in str(refused.value)


def test_a_missing_key_file_is_reported_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_keys([], tmp_path / "nowhere")


@pytest.mark.parametrize("secret", ["", "two words", "sécret"])
def test_rejects_keys_that_no_header_can_carry(secret):
    """Empty and non-ASCII keys are rejected at startup."""
    with pytest.raises(ConfigurationError, match="printable ASCII"):
        read_keys([secret], None)
