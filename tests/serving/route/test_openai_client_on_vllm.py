"""The real OpenAI client cannot tell vLLM's servers behind `twofold route` from workers of our own."""

import pytest

pytest.importorskip("vllm")

from serving.test_openai_client import *  # noqa: F403  (the same tests, with the same fixtures but one)


@pytest.fixture(scope="module")
def openai_base_url(fleet):
    """The address of the API, with its /v1."""
    return f"{fleet.url}/v1"
