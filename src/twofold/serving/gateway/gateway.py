"""What the gateway takes on for one HTTP request.

Reading a request body into a typed struct, strictly.

What every endpoint of the gateway works with.
"""

import re
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request

from twofold.errors import RequestError
from twofold.serving.controller.service import Service
from twofold.serving.gateway.output import LogprobFormat
from twofold.serving.gateway.tokenizer import TextTokenizer


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds on one HTTP request.

    `header_bytes` bounds the request line and all headers together. `prompt_characters` and `prompt_tokens` bound
    each prompt, where the model's context is not bound enough; `choices` bounds `n`; `generations` bounds `n` times
    the number of prompts; `stop_characters` bounds the length of each stop string. A request that names no timeout
    has `timeout_s` seconds to be answered in, and none may name more than `longest_timeout_s`. A prompt is
    kept for `longest_retention_s` at most, whatever is asked for.
    """

    header_bytes: int = 64 * 1024
    body_bytes: int = 32 * 1024 * 1024
    prompt_characters: int | None = None
    prompt_tokens: int | None = None
    timeout_s: float = 1800.0
    longest_timeout_s: float = 24 * 3600.0
    longest_retention_s: float = 3600.0
    choices: int = 128
    generations: int = 2048
    stop_strings: int = 16
    stop_characters: int = 1024


T = TypeVar("T", bound=msgspec.Struct)

_PLACE = re.compile(r" - at `\$\.?(?P<place>.*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")


async def read_struct(request: Request, kind: type[T], max_bytes: int) -> T:
    """Read the whole body and decode it as `kind`; raises RequestError (400 or 413) and ClientDisconnect."""
    body = await read_body(request, max_bytes)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, of which no more than `max_bytes` are ever held; a longer one is refused (413)."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than the {max_bytes} bytes taken here", status=413, code="request_too_large"
    )


def _field_error(message: str) -> RequestError:
    """A type error in the user's words: the field first, then what was expected and what came."""
    found = _PLACE.search(message)
    place = found["place"] if found else ""
    reason = _PLACE.sub("", message)
    missing = _MISSING.match(reason)
    if missing:
        field = ".".join(filter(None, (place, missing["name"])))
        return RequestError(
            f"{field}: this field is required", param=field, code="missing_required_parameter"
        )
    reason = reason.replace("`", "").replace(" | ", " or ").replace("Expected", "expected", 1)
    if not place:
        return RequestError(f"the body must be a JSON object: {reason}")
    return RequestError(f"{place}: {reason}", param=place, code="invalid_type_or_value")


@dataclass(frozen=True, slots=True)
class Gateway:
    """The service behind the gateway, the tokenizer of its model (if it has one) and the limits."""

    service: Service
    tokenizer: TextTokenizer | None
    limits: RequestLimits

    def check_model(self, name: str) -> None:
        """Raise RequestError (404) where another model is asked for than the one served."""
        served = self.service.model.name
        if name != served:
            raise RequestError(
                f"model: {name!r} is not served here; {served!r} is",
                param="model",
                status=404,
                code="model_not_found",
            )

    def require_tokenizer(self, field: str) -> TextTokenizer:
        """The tokenizer, for a request whose `field` cannot do without."""
        if self.tokenizer is None:
            raise RequestError(
                f"{field}: this model has no tokenizer, so only prompts of token ids are taken", param=field
            )
        return self.tokenizer

    def logprob_format(self) -> LogprobFormat:
        return LogprobFormat(None if self.tokenizer is None else self.tokenizer.bytes)
