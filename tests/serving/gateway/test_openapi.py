"""The gateway's responses to generated requests conform to its OpenAPI description."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks

from support.scripted_service import ScriptedService, served_model
from support.tokenizers_for_tests import byte_level
from twofold.serving.gateway.app import GatewaySettings, create_app
from twofold.serving.gateway.keys import ApiKey, KeyRing
from twofold.serving.gateway.openapi import openapi

KEY = {"Authorization": "Bearer secret"}
OPERATIONS = [
    (path, method, mode)
    for path, operations in openapi("tiny", keys=True)["paths"].items()
    for method, operation in operations.items()
    for mode in GenerationMode
    # Paths without parameters have no invalid requests.
    if mode is GenerationMode.POSITIVE or {"parameters", "requestBody"} & operation.keys()
]
# Constraints beyond JSON schema: the context length, and stream_options only with stream.
NOT_SAID = [checks.positive_data_acceptance]


@pytest.fixture(scope="module")
def description():
    """Return the OpenAPI description of a gateway with an API key and a short context."""
    service = ScriptedService(model=served_model(max_model_len=32))
    app = create_app(service, byte_level(), GatewaySettings(keys=KeyRing([ApiKey("fuzz", "secret")])))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_the_description_is_valid_openapi(description):
    description.validate()


@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_responses_match_the_description(description, path, method, mode):
    """Valid and invalid requests get only responses that the description documents."""

    @given(description[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def holds(case):
        response = case.call(headers=KEY)
        over = response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
        assert response.status_code < 500 or over, response.text
        excluded = [*NOT_SAID, checks.not_a_server_error]
        case.validate_response(response, excluded_checks=excluded, headers=KEY)

    holds()
