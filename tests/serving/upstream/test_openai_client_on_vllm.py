"""The OpenAI client tests, run against vLLM servers behind `twofold route`."""

import pytest

pytest.importorskip("vllm")

from serving.test_openai_client import *  # noqa: F403  (reuses the tests with other fixtures)
from serving.test_openai_client import complete as complete_once  # noqa: F401  (a fixture)
from support.api_client import metric


@pytest.fixture(scope="module")
def openai_base_url(fleet):
    return f"{fleet.url}/v1"


@pytest.fixture
def refusal():
    """The gateway passes the field on, and vLLM refuses it."""
    return "BadRequestError"


@pytest.fixture(scope="module")
def complete(complete_once, fleet):  # noqa: F811
    """Return a function that repeats a completion request that the gateway replayed, up to five attempts in all."""

    # vLLM cannot continue the random sequence of a lost request, so a replay changes sampled text. On a busy machine
    # the lease of the KV may end before the decode server has fetched it.
    def complete(**fields):
        for _ in range(5):
            replays = metric(fleet.url, "request_replays_total")
            answer = complete_once(**fields)
            if metric(fleet.url, "request_replays_total") == replays:
                return answer
        return pytest.fail("the gateway replayed each of five requests; see gateway.log")

    return complete
