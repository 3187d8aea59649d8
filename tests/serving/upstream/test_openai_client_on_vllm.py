"""The OpenAI client works the same with vLLM servers behind `twofold route` as with Twofold's workers."""

import pytest

pytest.importorskip("vllm")

from serving.test_openai_client import *  # noqa: F403  (reuses the tests with another fixture)


@pytest.fixture(scope="module")
def openai_base_url(fleet):
    """Base URL of the API, with /v1."""
    return f"{fleet.url}/v1"
