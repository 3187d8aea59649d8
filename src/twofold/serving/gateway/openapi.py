"""OpenAPI 3.1 description of the gateway: openapi.yaml, with the schemas of request and response bodies."""

from importlib.resources import files
from typing import Any

import msgspec
import yaml

import twofold
from twofold.serving.gateway import responses, schemas
from twofold.serving.gateway.endpoints.chat import ROLES, UNSUPPORTED_PARTS
from twofold.serving.gateway.endpoints.messages import CountFields, MessagesFields
from twofold.serving.gateway.endpoints.responses_input import NEUTRAL, ResponsesFields
from twofold.serving.gateway.generations import MODES, RETENTIONS
from twofold.serving.gateway.middleware import OPEN_PATHS

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
_PREFIX = "#/components/schemas/"
_NOT_SUPPORTED = "Not supported: accepts neutral values only."


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
    parts = {"type": "array", "items": {"$ref": f"{_PREFIX}ContentPart"}}
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
    described: Json = yaml.safe_load(files(__package__).joinpath("openapi.yaml").read_text(encoding="utf-8"))
    described["info"]["version"] = twofold.__version__
    components = described["components"]
    components["schemas"] = body_schemas(model)
    if keys:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        for path in described["paths"].keys() - OPEN_PATHS:
            for operation in described["paths"][path].values():
                operation["security"] = [{"bearer": []}]
                operation["responses"]["401"] = components["responses"]["401"]
    return described
