"""State shared by all endpoints, and decoding of request bodies."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from twofold.engine.grammar import GrammarMatchers
from twofold.errors import RequestError
from twofold.hardware.suggestions import explain_validation
from twofold.request import Generation
from twofold.serving.controller.live_request import OutputSink
from twofold.serving.controller.service import ServedModel
from twofold.serving.gateway.middleware import Arrival
from twofold.serving.gateway.response_store import ResponseStore
from twofold.serving.gateway.schemas import MAX_INT, GenerationFields, check_limit, check_served, invalid
from twofold.serving.gateway.tokenizer import TextTokenizer
from twofold.serving.gateway.tools.families import BY_CHECKPOINT, AnswerParsers

T = TypeVar("T", bound=msgspec.Struct)

_INLINE_BYTES = 256 * 1024  # decoding them takes a few ms at most
_SLICE_BYTES = 64 * 1024  # the event loop may run between two slices of a body


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on one HTTP request. Limits on prompts apply to each prompt separately.

    `choices` limits `n`, and `generations` limits `n` times the number of prompts. `timeout_s` is the default timeout.
    `longest_retention_s` limits how long clients may keep prompts cached. `stored_response_bytes` and
    `stored_response_s` limit the responses that clients can continue.
    """

    connections: int | None = None  # None: within the limit of open files, with a reserve
    connections_per_address: int | None = None  # None: a load balancer connects from one address for all clients
    header_bytes: int = 64 * 1024
    head_s: float = 30.0  # until a head is complete: clients connect to send one
    body_bytes: int = 32 * 1024 * 1024
    body_s: float = 300.0  # from the head to the end of the body: 32 MiB at 1 Mbit/s
    bodies_bytes: int = 256 * 1024 * 1024  # of all bodies that are being read: 8 of the largest
    body_containers: int = 200_000  # `{` and `[`: decoding many objects and lists delays all other requests
    body_values: int = 2_000_000  # commas: a prompt of a million token ids has half as many
    prompt_characters: int | None = None
    prompt_tokens: int | None = None
    timeout_s: float = 1800.0
    longest_timeout_s: float = 24 * 3600.0
    longest_retention_s: float = 3600.0
    messages: int = 10_000  # and the parts of their contents: conversations of agents have thousands
    tools: int = 1024  # the largest collections of tools have some hundreds
    choices: int = 128
    generations: int = 2048
    generated_prompt_tokens: int = 4 * 1024 * 1024  # of all generations: each one's prompt is hashed and sent
    stop_strings: int = 16
    stop_characters: int = 1024
    stop_searches: int = 8192  # stop strings times generations: 4 for each of 2048 generations
    stop_token_ids: int = 1024  # each process looks them up for every token
    bad_words: int = 128
    bad_word_characters: int = 8192  # of all together
    biased_tokens: int = 1024
    constraint_characters: int = 256 * 1024
    stored_response_bytes: int = 256 * 1024 * 1024
    stored_response_s: float = 24 * 3600.0


class Forwarder(Protocol):
    """Interface to servers that can answer a request which the gateway does not run itself."""

    def answer(self, request: Request, body: bytes) -> Response:
        """Return the answer of a server to a request with this body."""
        ...


class RequestRunner(Protocol):
    """The part of a service that runs requests (see `Service`)."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def takes_text(self) -> bool: ...

    def submit(self, generation: Generation, sink: OutputSink) -> None: ...

    def stop(self, request_id: str) -> None: ...

    def abort(self, request_id: str) -> None: ...


class BodyReader:
    """Reads the bodies of requests. Limits the size of each, the time for each, and the memory of all together.

    With `keeps`, `request.state.body` has the body of a request, from which more than its fields can be read.
    """

    def __init__(self, limits: RequestLimits, *, keeps: bool = False) -> None:
        self.limits, self.keeps = limits, keeps
        self._most_bytes = max(limits.bodies_bytes, limits.body_bytes)  # one body always fits
        self._reading_bytes = 0

    async def read(self, request: Request) -> bytes:
        """Read a request's body. Raises RequestError (408, 413 or 503) and ClientDisconnect."""
        take_whole = request.scope["state"].get("whole_body")
        whole: bytes | None = None if take_whole is None else take_whole()
        if whole is not None:
            self._check(len(whole))
            return whole
        arrival: Arrival = request.state.arrival
        most_s = min(self.limits.body_s, self.limits.timeout_s)
        content_length = request.headers.get("content-length", "")
        if content_length.isdecimal():
            self._check(int(content_length))
        body = bytearray()
        try:
            async with asyncio.timeout(arrival.monotonic_s + most_s - time.monotonic()):
                async for part in request.stream():
                    body += part
                    self._reading_bytes += len(part)
                    self._check(len(body))
        except TimeoutError as error:
            raise RequestError(
                f"the body did not arrive within the limit of {most_s:g} s", status=408, code="body_timeout"
            ) from error
        finally:
            self._reading_bytes -= len(body)
        return bytes(body)

    def _check(self, size: int) -> None:
        """Raise RequestError if one body of `size` bytes, or all bodies together, are too large."""
        most = self.limits.body_bytes
        if size > most:
            raise RequestError(f"the body exceeds the limit of {most} bytes", status=413, code="request_too_large")
        if self._reading_bytes > self._most_bytes:
            raise RequestError(
                f"the bodies of all requests exceed the limit of {self._most_bytes} bytes; try again later",
                status=503,
                code="bodies_too_large",
            )


@dataclass(frozen=True, slots=True)
class Gateway:
    """State shared by all endpoints: the service, the model's tokenizer (None if missing) and the limits."""

    service: RequestRunner
    tokenizer: TextTokenizer | None
    limits: RequestLimits
    constrains: bool = True  # whether the service can constrain outputs
    grammars: GrammarMatchers | None = None  # that check constraints; None: the servers behind this gateway do
    parsers: AnswerParsers = BY_CHECKPOINT
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(0, 0.0))
    bodies: BodyReader = field(default_factory=lambda: BodyReader(RequestLimits()))
    forwarder: Forwarder | None = None  # to servers behind this gateway

    def sends_text(self, fields: GenerationFields) -> bool:
        """Whether servers behind this gateway tokenize the prompts of a request, and detokenize its output."""
        if not self.service.takes_text or self.limits.prompt_tokens is not None:
            return False
        by_token = fields.wanted_logprobs is not None or fields.echoes or fields.return_token_ids
        # Without a limit, the length of the prompt decides how long the output may be.
        limited = (
            fields.token_limit is not None or fields.default_max_tokens < MAX_INT or not self.service.model.returns_ids
        )
        return limited and not (by_token or fields.include_stop_str_in_output)

    def check_model(self, name: str) -> None:
        """Raise RequestError (404) unless `name` is the served model or one of its adapters."""
        if name not in self.service.model.adapters:
            check_served(name, self.service.model.name)

    def require_tokenizer(self, field: str) -> TextTokenizer:
        """Return the tokenizer. Raises RequestError if the model has no tokenizer."""
        if self.tokenizer is None:
            raise invalid(field, "this model has no tokenizer, so prompts must be token ids")
        return self.tokenizer

    def least_tokens(self, characters: int) -> int:
        """Return the least number of tokens of a text, which is at least 1."""
        return max(1, characters // self.require_tokenizer("prompt").longest_token)

    def check_length(self, characters: int, field: str) -> None:
        """Raise RequestError if a text is too long for the limits or for the model's context."""
        check_limit(field, characters, self.limits.prompt_characters, "characters", code="prompt_too_long")
        context = self.service.model.max_model_len
        tokens = characters // self.require_tokenizer(field).longest_token
        if tokens > context:
            raise invalid(
                field,
                f"{characters} characters are at least {tokens} tokens, "
                f"but the context length of this model is {context} tokens",
                code="context_length_exceeded",
            )

    def check_tokens(self, tokens: int, field: str) -> None:
        """Raise RequestError if a prompt of `tokens` tokens exceeds the configured limit."""
        check_limit(field, tokens, self.limits.prompt_tokens, "tokens", code="prompt_too_long")

    def check_context(self, tokens: int, field: str) -> None:
        """Raise RequestError if as many tokens do not fit into the model's context."""
        context = self.service.model.max_model_len
        if tokens > context:
            raise invalid(
                field,
                f"{tokens} tokens are more than the context length of this model, {context} tokens",
                code="context_length_exceeded",
            )

    def check_chat(self, contents: Sequence[object], tools: Sequence[object] | None, field: str) -> None:
        """Raise RequestError if a chat has too many messages, parts of messages (lists in `contents`), or tools."""
        parts, limits = len(contents), self.limits
        if parts <= limits.messages:
            parts += sum(len(each) for each in contents if isinstance(each, list))
        check_limit(field, parts, limits.messages, "messages and parts")
        check_limit("tools", len(tools or ()), limits.tools, "tools")


async def read_struct(request: Request, kind: type[T], bodies: BodyReader) -> T:
    """Decode a request's JSON body as type `kind`. Raises RequestError (400, 408, 413 or 503) and ClientDisconnect."""
    state = request.scope["state"]
    body: bytes = state.get("body") or await bodies.read(request)
    closed: type[T] | None = None
    if bodies.keeps:
        state["body"] = body
        closed = closed_kind(kind)
    if len(body) <= _INLINE_BYTES:
        return _decode(body, kind, closed, bodies.limits)
    return await asyncio.to_thread(_decode, body, kind, closed, bodies.limits)


@cache
def closed_kind(kind: type[T]) -> type[T]:
    """Return a subclass of a struct type for bodies that have no other fields."""
    made = msgspec.defstruct(kind.__name__, (), bases=(kind,), frozen=True, kw_only=True, forbid_unknown_fields=True)
    return cast(type[T], made)


def _decode(body: bytes, kind: type[T], closed: type[T] | None, limits: RequestLimits) -> T:
    # The decoder holds the interpreter's lock, so the size of its work is limited first.
    if len(body) > min(2 * limits.body_containers, limits.body_values):  # an object or list has two bytes
        _check_size(body, limits)
    if closed is not None:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(body, type=closed)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _type_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _check_size(body: bytes, limits: RequestLimits) -> None:
    containers = values = 0
    for start in range(0, len(body), _SLICE_BYTES):
        containers += sum(body.count(each, start, start + _SLICE_BYTES) for each in (b"{", b"["))
        values += body.count(b",", start, start + _SLICE_BYTES)
    for count, most, what in (
        (containers, limits.body_containers, "objects and lists"),
        (values, limits.body_values, "values"),
    ):
        if count > most:
            raise RequestError(f"the body has about {count} {what}, more than the limit of {most}")


def _type_error(error: msgspec.ValidationError) -> RequestError:
    place, reason = explain_validation(error, "object")
    _, missing, name = reason.partition("missing required field ")
    if missing:
        field = ".".join(filter(None, (place, name)))
        return invalid(field, "this field is required", code="missing_required_parameter")
    if not place:
        return RequestError(f"the body must be a JSON object: {reason}")
    return invalid(place, reason, code="invalid_type_or_value")
