"""The terms of a request: on whose behalf, how urgent, until when it is of use, and for how long its prompt may be."""

import math

import msgspec
from starlette.requests import Request as HttpRequest

from twofold.errors import RequestError
from twofold.serving.gateway.caching import retention_s
from twofold.serving.gateway.gateway import Gateway
from twofold.serving.gateway.keys import ApiKey
from twofold.serving.gateway.middleware import arrival_of
from twofold.serving.gateway.schemas import GenerationFields

TIMEOUT_HEADER = "X-Request-Timeout"


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is the API key's name (empty: none), `priority` vLLM's, `deadline_s` on the monotonic clock.

    Its prompt is to be kept for `retain_s` seconds for those that begin alike, and have the same `cache_salt`.
    """

    key: str
    priority: int
    deadline_s: float
    retain_s: float
    cache_salt: str


def terms_of(gateway: Gateway, request: HttpRequest, fields: GenerationFields, prompts: int) -> Terms:
    """Raises RequestError on a timeout or a retention that is none, and on more generations than the key may have."""
    arrival = arrival_of(request)
    if arrival.key is not None:
        _check_key(arrival.key, (fields.n or 1) * prompts)
    return Terms(
        key="" if arrival.key is None else arrival.key.name,
        priority=fields.priority or 0,
        deadline_s=arrival.monotonic_s + _timeout_s(gateway, request, fields),
        retain_s=retention_s(fields, gateway.limits.longest_retention_s),
        cache_salt=fields.cache_salt or "",
    )


def _timeout_s(gateway: Gateway, request: HttpRequest, fields: GenerationFields) -> float:
    """The shorter of the field and the header; the service's own where there is neither."""
    wanted = []
    if fields.timeout is not None:
        wanted.append(("timeout", fields.timeout))
    given = request.headers.get(TIMEOUT_HEADER)
    if given is not None:
        wanted.append((TIMEOUT_HEADER, _seconds(given)))
    if not wanted:
        return gateway.limits.timeout_s
    name, timeout_s = min(wanted, key=lambda each: each[1])
    most = gateway.limits.longest_timeout_s
    if timeout_s > most:
        raise RequestError(f"{name}: {timeout_s:g} s is more than the limit of {most:g} s", param=name)
    return timeout_s


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(
            f"{TIMEOUT_HEADER}: expected a positive number of seconds",
            param=TIMEOUT_HEADER,
            code="invalid_header",
        )
    return seconds


def _check_key(key: ApiKey, generations: int) -> None:
    """A request that could never be taken whole is wrong, not early."""
    for most, what in (
        (key.limits.max_concurrent, "at once"),
        (key.limits.requests_per_minute, "in a minute"),
    ):
        if most is not None and generations > most:
            raise RequestError(
                f"n: this request makes {generations} generations, but this API key may have {most} {what}",
                param="n",
            )
