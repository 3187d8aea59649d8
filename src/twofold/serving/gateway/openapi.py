"""OpenAPI 3.1 description of the gateway."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

import twofold
from twofold.serving.gateway import responses, schemas
from twofold.serving.gateway.endpoints.chat import ROLES, UNSUPPORTED_PARTS
from twofold.serving.gateway.endpoints.messages import CountFields, MessagesFields
from twofold.serving.gateway.endpoints.responses_input import NEUTRAL, ResponsesFields
from twofold.serving.gateway.generations import MODES, RETENTIONS, TIMEOUT_HEADER

Json = dict[str, Any]

_REQUESTS = (
    schemas.ChatFields,
    schemas.CompletionFields,
    schemas.DetokenizeFields,
    schemas.TokenizeFields,
    CountFields,
    MessagesFields,
    ResponsesFields,
)
_ANSWERS = (
    responses.ChatChunk,
    responses.ChatCompletion,
    responses.Completion,
    responses.Detokenized,
    responses.ErrorBody,
    responses.Health,
    responses.ModelList,
    responses.Tokenized,
    responses.Version,
)
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The model does not exist.",
    413: "The body is too large.",
    429: "The service is overloaded; retry after `Retry-After` seconds.",
    431: "The headers are too large.",
    500: "An unexpected error occurred.",
    503: "The service is not ready, or lost the request.",
    504: "The request was not answered within its timeout.",
}
_REQUEST_ID: Json = {
    "description": "The client's X-Request-Id if it is valid, else a new id.",
    "required": True,
    "schema": {"type": "string"},
}
_RETRY_AFTER: Json = {
    "description": "Seconds to wait before a retry.",
    "required": True,
    "schema": {"type": "integer", "minimum": 1},
}
_TIMEOUT: Json = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "description": "Timeout of the request in seconds, like the field `timeout`.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
_PATH: Json = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_ANY_OBJECT: Json = {"application/json": {"schema": {"type": "object"}}}
_PREFIX = "#/components/schemas/"
_NOT_SUPPORTED = "Not supported: accepts neutral values only."


def reference(kind: type) -> Json:
    return {"$ref": f"{_PREFIX}{kind.__name__}"}


def body_schemas(model: str) -> Json:
    """Return the JSON schemas of all request and response bodies by name."""
    bodies = (*_REQUESTS, *_ANSWERS)
    _, made = msgspec.json.schema_components(bodies, schema_hook=_schema_hook, ref_template=f"{_PREFIX}{{name}}")
    for kind in (schemas.ChatFields, schemas.CompletionFields):
        fields = made[kind.__name__]["properties"]
        fields["model"] = {"const": model}
        fields["prompt_cache_retention"] = {"enum": [None, *RETENTIONS]}
        for name in schemas.UNSUPPORTED.keys() - kind.supported:
            fields[name] = {"enum": [None, *schemas.UNSUPPORTED[name]], "description": _NOT_SUPPORTED}
    for name, neutral in NEUTRAL.items():
        made["ResponsesFields"]["properties"][name] = {"enum": [None, *neutral], "description": _NOT_SUPPORTED}
    made["StructuredOutputs"]["properties"]["structural_tag"] = {"enum": [None], "description": _NOT_SUPPORTED}
    made["PromptCacheOptions"]["properties"]["mode"] = {"enum": [None, *MODES]}
    made["ChatFields"]["properties"]["messages"]["minItems"] = 1
    part = {"type": {"const": "text"}, "text": {"type": "string"}}
    made["ContentPart"] |= {"properties": part, "required": list(part)}
    message = made["InputMessage"]["properties"]
    message["role"] = {"enum": list(ROLES)}
    parts = {"type": "array", "items": reference(schemas.ContentPart)}
    message["content"] = {"anyOf": [{"type": "string"}, parts]}
    for name in UNSUPPORTED_PARTS:
        message[name] = {"enum": [None, [], {}], "description": _NOT_SUPPORTED}
    made["InputMessage"]["required"] = ["role", "content"]
    return dict(made)


def _schema_hook(kind: type) -> Json:
    if kind is object:
        return {"description": "Anything."}  # msgspec treats an empty schema as missing
    raise NotImplementedError(f"{kind} has no place in a body")


def openapi(model: str, *, keys: bool) -> Json:
    """Return the API description of a gateway that serves `model`. With `keys`, /v1 requires bearer authorization."""
    components: Json = {"schemas": body_schemas(model)}
    if keys:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Twofold", "version": twofold.__version__, "license": {"name": "Apache-2.0"}},
        "paths": _api(keys=keys) | _operations(),
        "components": components,
    }


def _api(*, keys: bool) -> Json:
    posted, generates = (400, 404, 413), (400, 404, 413, 429, 503, 504)
    streams: Json = _ANY_OBJECT | {"text/event-stream": {"schema": {"type": "string"}}}
    response, message = "A response of OpenAI's", "A message of Anthropic's"
    tokenized, detokenized = _json(responses.Tokenized), _json(responses.Detokenized)
    paths: Json = {
        "/v1/completions": {
            "post": _generation("completions", schemas.CompletionFields, responses.Completion, responses.Completion)
        },
        "/v1/chat/completions": {
            "post": _generation("chat", schemas.ChatFields, responses.ChatCompletion, responses.ChatChunk)
        },
        "/v1/responses": {"post": _operation("responses", response, streams, body=ResponsesFields, errors=generates)},
        "/v1/responses/{id}": {
            "get": _operation("response", "A stored response", _ANY_OBJECT, errors=(404,)),
            "delete": _operation("delete_response", "Forget a stored response", _ANY_OBJECT, errors=(404,)),
        },
        "/v1/responses/{id}/input_items": {"get": _operation("input_items", "Its input", _ANY_OBJECT, errors=(404,))},
        "/v1/messages": {"post": _operation("messages", message, streams, body=MessagesFields, errors=generates)},
        "/v1/messages/count_tokens": {
            "post": _operation("count_tokens", "The tokens of a prompt", _ANY_OBJECT, body=CountFields, errors=posted)
        },
        "/tokenize": {
            "post": _operation("tokenize", "A Tokenized", tokenized, body=schemas.TokenizeFields, errors=posted)
        },
        "/detokenize": {
            "post": _operation("detokenize", "A Detokenized", detokenized, body=schemas.DetokenizeFields, errors=posted)
        },
        "/v1/models": {"get": _operation("models", "The model served", _json(responses.ModelList))},
        "/v1/models/{model}": {"get": _operation("model", "One model", _json(responses.ModelCard), errors=(404,))},
    }
    for path, operations in paths.items():
        for operation in operations.values():
            if found := re.findall(r"{(\w+)}", path):
                operation["parameters"] = [_PATH | {"name": name} for name in found]
            if keys:
                operation["security"] = [{"bearer": []}]
                operation["responses"]["401"] = _error(401)
            if path.startswith("/v1/messages"):  # errors in Anthropic's form, but for a missing key
                for status in operation["responses"].keys() - {"200", "401", "431"}:
                    operation["responses"][status]["content"] = _ANY_OBJECT
    return paths


def _operations() -> Json:
    text: Json = {"schema": {"type": "string"}}
    return {
        "/health": {"get": _health("health")},
        "/ping": {"get": _health("ping"), "post": _health("post_ping")},
        "/version": {"get": _operation("version", "The version of the software", _json(responses.Version))},
        "/metrics": {"get": _operation("metrics", "Prometheus text exposition", {"text/plain": text})},
        "/openapi.json": {"get": _operation("description", "This description", _ANY_OBJECT)},
        "/docs": {"get": _operation("docs", "This description as a page", {"text/html": text})},
    }


def _generation(name: str, body: type, whole: type, chunk: type) -> Json:
    stream: Json = {"type": "string", "description": f"Every event is a {chunk.__name__}; the last is [DONE]."}
    answers: Json = _json(whole) | {"text/event-stream": {"schema": stream}}
    operation = _operation(name, f"A {whole.__name__}", answers, body=body, errors=(400, 404, 413, 429, 503, 504))
    operation["parameters"] = [_TIMEOUT]
    return operation


def _health(name: str) -> Json:
    operation = _operation(name, "200 if ready, else 503", _json(responses.Health))
    operation["responses"]["503"] = operation["responses"]["200"]
    return operation


def _operation(name: str, summary: str, answers: Json, *, body: type | None = None, errors: Sequence[int] = ()) -> Json:
    success: Json = {"description": "Success.", "headers": {"X-Request-Id": _REQUEST_ID}, "content": answers}
    operation: Json = {"operationId": name, "summary": summary, "responses": {"200": success}}
    for status in (*errors, 431, 500):
        operation["responses"][str(status)] = _error(status)
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _json(kind: type) -> Json:
    return {"application/json": {"schema": reference(kind)}}


def _error(status: int) -> Json:
    # Status 431 is sent before the request id is read.
    headers: Json = {} if status == 431 else {"X-Request-Id": _REQUEST_ID}
    if status in (429, 503):
        headers["Retry-After"] = _RETRY_AFTER
    return {"description": _ERRORS[status], "headers": headers, "content": _json(responses.ErrorBody)}
