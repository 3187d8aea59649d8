"""Reading a request body into a typed struct, strictly."""

import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from twofold.errors import RequestError

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
