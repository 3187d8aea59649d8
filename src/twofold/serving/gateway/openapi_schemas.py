"""The bodies of the API as JSON schemas, from the types that they are read into and written from."""

import msgspec

from twofold.serving.gateway.caching import MODES, RETENTIONS
from twofold.serving.gateway.errors import ErrorBody
from twofold.serving.gateway.messages import ROLES, UNSUPPORTED_PARTS
from twofold.serving.gateway.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Health,
    ModelCard,
    ModelList,
    Version,
)
from twofold.serving.gateway.schemas import ChatFields, CompletionFields, ContentPart
from twofold.serving.gateway.unsupported import NEUTRAL, UnsupportedFields

Json = dict[str, object]

_STRUCTS = (
    ChatChunk,
    ChatCompletion,
    ChatFields,
    Completion,
    CompletionFields,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
    Version,
)
_PREFIX = "#/components/schemas/"
_NOT_SUPPORTED = "Not supported: only values that ask for nothing."


def reference(kind: type) -> Json:
    return {"$ref": f"{_PREFIX}{kind.__name__}"}


def schemas(model: str) -> Json:
    """Every struct by name, narrowed to what is taken where its type says less; `model` is the one served."""
    _, made = msgspec.json.schema_components(
        _STRUCTS, schema_hook=_anything, ref_template=f"{_PREFIX}{{name}}"
    )
    for kind in (ChatFields, CompletionFields):
        fields = made[kind.__name__]["properties"]
        fields["model"] = {"const": model}
        fields["prompt_cache_retention"] = {"enum": [None, *RETENTIONS]}
        for name in UnsupportedFields.__struct_fields__:
            if name != "best_of":  # any number, as long as it is that of `n`
                fields[name] = {"enum": [None, *NEUTRAL.get(name, ())], "description": _NOT_SUPPORTED}
    made["PromptCacheOptions"]["properties"]["mode"] = {"enum": [None, *MODES]}
    made["ChatFields"]["properties"]["messages"]["minItems"] = 1
    part = {"type": {"const": "text"}, "text": {"type": "string"}}
    made["ContentPart"] |= {"properties": part, "required": list(part)}
    message = made["Message"]["properties"]
    message["role"] = {"enum": list(ROLES)}
    parts = {"type": "array", "items": reference(ContentPart)}
    message["content"] = {"anyOf": [{"type": "string"}, parts]}
    for name in UNSUPPORTED_PARTS:
        message[name] = {"enum": [None, [], {}], "description": _NOT_SUPPORTED}
    made["Message"]["required"] = ["role", "content"]
    return dict(made)


def _anything(kind: type) -> Json:
    if kind is object:
        return {"description": "Anything."}  # msgspec takes an empty schema for none
    raise NotImplementedError(f"{kind} has no place in a body")
