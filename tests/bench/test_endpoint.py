"""An endpoint is found, or one sentence says why not."""

import asyncio

import pytest

from support.scripted_endpoint import endpoint
from twofold.bench.endpoint import discover, root_url
from twofold.errors import ConfigurationError


def find(url, model=None, api_key=None):
    return asyncio.run(discover(url, model, api_key))


def test_the_first_model_and_its_sizes_are_taken():
    """Without --model the first served model is meant, with the limits the server tells."""
    cards = [{"id": "one", "max_model_len": 128, "vocab_size": 300}, {"id": "two"}]
    with endpoint(models=cards) as scripted:
        found = find(scripted.url)
        assert (found.model, found.max_model_len, found.vocab_size) == ("one", 128, 300)
        assert find(scripted.url, "two").max_model_len is None


def test_a_model_that_is_not_served_is_named_with_those_that_are():
    """The sentence says what would be right."""
    with endpoint() as scripted, pytest.raises(ConfigurationError, match="serves scripted, not other"):
        find(scripted.url, "other")


def test_a_server_without_a_list_is_taken_at_its_word():
    """Some gateways have no /v1/models: --model is then needed, and enough."""
    with endpoint(models_status=404) as scripted:
        assert find(scripted.url, "mine").model == "mine"
        with pytest.raises(ConfigurationError, match="HTTP 404"):
            find(scripted.url)


def test_a_refused_key_is_said():
    """401 is about the key, not about the model."""
    with endpoint(models_status=401) as scripted, pytest.raises(ConfigurationError, match="API key"):
        find(scripted.url, "mine")


def test_nobody_there():
    """A closed port is one sentence."""
    with endpoint() as scripted:
        pass
    with pytest.raises(ConfigurationError, match="no OpenAI endpoint can be reached"):
        find(scripted.url)


def test_base_urls():
    """A trailing /v1 or slash is harmless; anything but HTTP is refused."""
    assert root_url("http://a:1/v1/") == root_url("http://a:1/") == "http://a:1"
    for wrong in ("localhost:8000", "ftp://a", "", "http://"):
        with pytest.raises(ConfigurationError):
            root_url(wrong)
