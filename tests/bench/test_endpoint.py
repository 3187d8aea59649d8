"""The benchmark client asks the server for the model's name and limits."""

import asyncio

import pytest

from support.scripted_endpoint import endpoint
from twofold.bench.endpoint import discover, root_url
from twofold.errors import ConfigurationError


def find(url, model=None, api_key=None):
    return asyncio.run(discover(url, model, api_key))


def test_uses_the_first_served_model_by_default():
    """Without `--model`, the client uses the first model in the server's list."""
    cards = [{"id": "one", "max_model_len": 128, "vocab_size": 300}, {"id": "two"}]
    with endpoint(models=cards) as scripted:
        found = find(scripted.url)
        assert (found.model, found.max_model_len, found.vocab_size) == ("one", 128, 300)
        assert find(scripted.url, "two").max_model_len is None


def test_unserved_model_error_lists_the_served_models():
    with endpoint() as scripted, pytest.raises(ConfigurationError, match="serves scripted, not other"):
        find(scripted.url, "other")


def test_servers_without_a_model_list_need_an_explicit_model():
    """A server without /v1/models, such as some gateways, requires `--model`."""
    with endpoint(models_status=404) as scripted:
        assert find(scripted.url, "mine").model == "mine"
        with pytest.raises(ConfigurationError, match="HTTP 404"):
            find(scripted.url)


def test_a_rejected_api_key_is_reported():
    """HTTP 401 is reported as an invalid API key, not as a missing model."""
    with endpoint(models_status=401) as scripted, pytest.raises(ConfigurationError, match="API key"):
        find(scripted.url, "mine")


def test_an_unreachable_endpoint_is_a_configuration_error():
    with endpoint() as scripted:
        pass
    with pytest.raises(ConfigurationError, match="no OpenAI endpoint can be reached"):
        find(scripted.url)


def test_normalizes_base_urls():
    assert root_url("http://a:1/v1/") == root_url("http://a:1/") == "http://a:1"
    for wrong in ("localhost:8000", "ftp://a", "", "http://"):
        with pytest.raises(ConfigurationError):
            root_url(wrong)
