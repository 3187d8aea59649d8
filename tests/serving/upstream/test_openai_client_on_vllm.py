"""The OpenAI client tests, run against vLLM servers behind `twofold route`."""

import pytest

pytest.importorskip("vllm")

from serving.test_openai_client import *  # noqa: F403  (reuses the tests with another fixture)


@pytest.fixture(scope="module")
def openai_base_url(fleet):
    return f"{fleet.url}/v1"
