"""HTTP client for the completions API of a vLLM server (vLLM 0.32, `entrypoints/openai`), with token ids as prompts and
outputs. Closing the connection aborts a request.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar
from zlib import crc32

import msgspec
import numpy as np

from twofold.errors import TwofoldError
from twofold.request import FinishReason, TokenizerId, TokenOutput
from twofold.serving.upstream.connection import ConnectionPool, ServerConnection

T = TypeVar("T")
KvParams = Mapping[str, object]

# Prefill with KV for a remote decode (vLLM's `NixlConnector`).
REMOTE_DECODE: KvParams = {"do_remote_decode": True, "do_remote_prefill": False}

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_NAMED = re.compile(r"token_id:([0-9]{1,9})")

# Statuses of invalid requests; all other errors are the server's.
_REFUSALS = (400, 413, 422)
_OK = 200
_JSON = {"content-type": "application/json"}
_DATA, _DONE = b"data:", b"[DONE]"
_PROMPT_IDS, _NO_IDS, _COMMA = b'"prompt_token_ids":', msgspec.Raw(), ord(",")
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_LINE_BYTES = 1 << 24  # the first event of a stream repeats the prompt


class UnavailableError(TwofoldError):
    """Raised if a server is unreachable, closes the connection or cannot serve requests."""


class StatusError(UnavailableError):
    """Raised if a server responds with an error status, though it may run other requests."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RejectedError(TwofoldError):
    """Raised if a server rejects a request as invalid."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerError(TwofoldError):
    """Raised if the body of a successful HTTP response contains an error or malformed data."""


class ServerModel(msgspec.Struct, frozen=True):
    """Name of the model on a server (`id`), and its context length in tokens."""

    id: str
    max_model_len: int | None = None  # None if the server does not tell
    owned_by: str = ""


class _Cards(msgspec.Struct, frozen=True):
    data: list[ServerModel]


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []  # the keys are token ids, written as `token_id:N`


class UpstreamChoice(msgspec.Struct, frozen=True):
    """Output tokens: all of them in a complete response, or the new ones in one event of a stream."""

    token_ids: list[TokenizerId] | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None

    def outputs(self, first_index: int, *, text: bool = False) -> list[TokenOutput]:
        """Return all tokens, from `first_index` on; with `text`, the last one has their text. Raises ServerError."""
        tokens, logprobs, reason = self.token_ids or [], self.logprobs, self.finish_reason
        if reason is not None and reason not in _FINISH:
            raise ServerError(f"the output ended with {reason!r}")
        if reason is not None and not tokens:
            raise ServerError(f"the output ended with {reason!r} and no token")
        last = len(tokens) - 1
        return [
            TokenOutput(
                index=first_index + place,
                token_id=token_id,
                logprob=None if logprobs is None else _at(logprobs.token_logprobs, place),
                top_logprobs=() if logprobs is None else _top(_at(logprobs.top_logprobs, place)),
                finish_reason=_FINISH[reason] if reason is not None and place == last else None,
                text=(self.text if place == last else "") if text else None,
            )
            for place, token_id in enumerate(tokens)
        ]

    def text_outputs(self, index: int) -> list[TokenOutput]:
        """Return the text of this choice as one output, with a negative checksum in place of its token id.

        A replay on another server is compared with it by the checksum. Raises ServerError for invalid data.
        """
        reason, text = self.finish_reason, self.text or ""
        if reason is not None and reason not in _FINISH:
            raise ServerError(f"the output ended with {reason!r}")
        if not text and reason is None:
            return []
        finish = None if reason is None else _FINISH[reason]
        return [TokenOutput(index=index, token_id=-1 - crc32(text.encode()), text=text, finish_reason=finish)]


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str = "no message"


class _Metrics(msgspec.Struct, frozen=True):
    queue_time_ms: float | None = None


class _TokenCounts(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class UpstreamCompletion(msgspec.Struct):
    """Completion from a server: a complete response, or one event of a stream.

    `prompt_ids` is the JSON list of the prompt's token ids in a complete response or in the first event, else empty.
    """

    choices: list[UpstreamChoice] = []
    error: _ErrorBody | None = None
    kv_transfer_params: dict[str, object] | None = None
    metrics: _Metrics | None = None  # of vLLM servers with --enable-per-request-metrics
    prompt_ids: msgspec.Raw = _NO_IDS
    usage: _TokenCounts | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt; 0 if the server does not tell."""
        ids = bytes(self.prompt_ids)
        if not ids:
            return 0 if self.usage is None else self.usage.prompt_tokens
        return 1 + int(np.count_nonzero(np.frombuffer(ids, np.uint8) == _COMMA))

    @property
    def queue_s(self) -> float:
        """Seconds that the request waited on the server; 0 if the server does not tell."""
        return 0.0 if self.metrics is None else (self.metrics.queue_time_ms or 0.0) / 1e3

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens that the prefill server found in its prefix cache."""
        cached = (self.kv_transfer_params or {}).get("remote_prefill_cached_tokens")
        return cached if isinstance(cached, int) else 0


_decoder = msgspec.json.Decoder(UpstreamCompletion)


def read_completion(data: bytes) -> UpstreamCompletion:
    """Decode a completion, or the line of an event. Raises ServerError if it has an error or malformed data."""
    data, prompt_ids = _without_prompt_ids(data)
    try:
        answer = _decoder.decode(data.removeprefix(_DATA))
    except _MALFORMED as error:
        raise ServerError(f"not a completion: {data[:200]!r} ({error})") from error
    if answer.error is not None:
        raise ServerError(answer.error.message)
    answer.prompt_ids = prompt_ids
    return answer


def _without_prompt_ids(data: bytes) -> tuple[bytes, msgspec.Raw]:
    """Return a completion without the token ids of its prompt, and the list of them, which takes long to parse."""
    start = data.find(_PROMPT_IDS) + len(_PROMPT_IDS)  # in no string: its quotes would be escaped
    end = data.find(b"]", start) + 1
    ids = data[start:end]
    if start < len(_PROMPT_IDS) or not ids.lstrip().startswith(b"["):
        return data, _NO_IDS
    return b"%bnull%b" % (data[:start], data[end:]), msgspec.Raw(ids)


def error_text(body: bytes) -> str:
    """Return the error message in the body of a response with a status other than 200."""
    try:
        error = _decoder.decode(body).error
    except _MALFORMED:
        error = None
    return body[:300].decode(errors="replace") if error is None else error.message


def rejected_decode_body(model: str, kv: KvParams) -> bytes:
    """Return the body of a decode request that is invalid on purpose.

    The decode server rejects the request and tells the prefill server to free the KV cache described by `kv`.
    """
    # vLLM: `notify_kv_transfer_request_rejected`. Otherwise the KV is kept until its lease ends, by default for 30 s.
    fields = {"model": model, "prompt": [0], "max_tokens": 1 << 30, "kv_transfer_params": kv}
    return msgspec.json.encode(fields)


def _at(values: Sequence[T | None], place: int) -> T | None:
    return values[place] if place < len(values) else None


def _top(named: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    found = ((_NAMED.fullmatch(name), value) for name, value in (named or {}).items())
    known = [(int(match[1]), value) for match, value in found if match is not None]
    return tuple(sorted(known, key=lambda each: -each[1]))


OnEvent = Callable[[UpstreamCompletion], None]
OnTokens = Callable[[list[int], list[str]], None]
_NO_CHOICE = UpstreamChoice()


class _EventReader:
    """Reads the events of a stream: each is a line followed by an empty line.

    With `on_tokens`, it gets the tokens after the first that are one event each: the ids and the texts of as many as
    arrive together. Events with anything else go to `on_event`.
    """

    def __init__(self, on_event: OnEvent, on_tokens: OnTokens | None) -> None:
        self.done = False
        self._on_event, self._on_tokens, self._left = on_event, on_tokens, bytearray()
        self._begun = False  # whether the first token has arrived
        self._token_ids, self._texts = list[int](), list[str]()

    def feed(self, received: bytes) -> None:
        if b"\n" not in received:
            self._left += received
            if len(self._left) > _LINE_BYTES:
                raise ServerError(f"an event has more than {_LINE_BYTES} bytes")
            return
        lines = received.split(b"\n")
        if self._left:
            self._left += lines[0]
            lines[0] = bytes(self._left)
        self._left = bytearray(lines.pop())
        try:
            for line in lines:
                stripped = line.strip() if line else line  # without a copy of a long line
                if not stripped or self.done or stripped.startswith(b":"):  # a comment keeps the connection alive
                    continue
                if stripped.endswith(_DONE):
                    self.done = True
                    continue
                if self._begun and self._is_token(stripped):
                    continue
                self._pass_on()
                event = read_completion(stripped)
                if self._on_tokens is not None and event.choices and event.choices[0].token_ids:
                    self._begun = True
                self._on_event(event)
        finally:  # events before an invalid one count
            self._pass_on()

    def _is_token(self, line: bytes) -> bool:
        """Take the event of one token after the first; return False for any other event."""
        try:
            event = _decoder.decode(line.removeprefix(_DATA))
        except _MALFORMED:  # `read_completion` raises it
            return False
        choice = event.choices[0] if event.choices and event.error is None else _NO_CHOICE
        ids, text, more = choice.token_ids, choice.text, choice.finish_reason or choice.logprobs
        if ids is None or len(ids) != 1 or text is None or more is not None:
            return False
        self._token_ids.append(ids[0])
        self._texts.append(text)
        return True

    def _pass_on(self) -> None:
        token_ids, texts = self._token_ids, self._texts
        if token_ids and self._on_tokens is not None:
            self._token_ids, self._texts = [], []
            self._on_tokens(token_ids, texts)


class VllmClient:
    """HTTP client of the vLLM server at `url`. Requests without `timeout_s` may take any time."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        self._pool = ConnectionPool(url, api_key)

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.close()

    async def complete(self, body: bytes) -> UpstreamCompletion:
        """Send a completion request and return the response. Raises UnavailableError, RejectedError and ServerError."""
        return read_completion(await self._read(await self._opened("POST", "/v1/completions", body)))

    async def stream(self, body: bytes, on_event: OnEvent, on_tokens: OnTokens | None = None) -> None:
        """Send a completion request, and call `on_event` with each event of its stream.

        With `on_tokens`, it gets the ids and texts of tokens whose events have nothing else. Raises the same errors as
        `complete`, and those of the two functions.
        """
        events = _EventReader(on_event, on_tokens)
        connection = await self._opened("POST", "/v1/completions", body)
        try:
            await connection.pour(events.feed)  # to the end, so that the connection can be reused
        except OSError as error:
            raise self._broken(error) from error
        finally:
            self._pool.release(connection)
        if not events.done:
            raise UnavailableError(f"{self.url} closed the connection during a stream")

    async def card(self, timeout_s: float) -> ServerModel:
        """Return the description of the server's model; raises UnavailableError."""
        body = await self.get("/v1/models", timeout_s)
        try:
            return msgspec.json.decode(body, type=_Cards).data[0]
        except (msgspec.DecodeError, IndexError) as error:
            raise UnavailableError(f"{self.url} returned no model list") from error

    async def metrics(self, timeout_s: float) -> str:
        """Return the server's metrics in the Prometheus text format; raises UnavailableError."""
        return (await self.get("/metrics", timeout_s)).decode(errors="replace")

    async def get(self, path: str, timeout_s: float) -> bytes:
        """Return the answer of a GET request; raises UnavailableError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read(await self._opened("GET", path, b""))
        except RejectedError as error:
            raise UnavailableError(f"{self.url}{path}: {error}") from error
        except TimeoutError as error:
            raise UnavailableError(f"{self.url} did not respond in time") from error

    @asynccontextmanager
    async def response(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[ServerConnection, None]:
        """Send a request and yield its connection, with an answer of any status. Raises UnavailableError."""
        connection = await self._requested(method, path, body, headers)
        try:
            yield connection
        except OSError as error:
            raise self._broken(error) from error
        finally:
            self._pool.release(connection)

    async def _opened(self, method: str, path: str, body: bytes) -> ServerConnection:
        """Return a request's connection with status 200, to be released. Raises UnavailableError, RejectedError."""
        connection = await self._requested(method, path, body, _JSON)
        if connection.status == _OK:
            return connection
        message = error_text(await self._read(connection))
        if connection.status in _REFUSALS:
            raise RejectedError(connection.status, message)
        raise StatusError(connection.status, f"{self.url} returned HTTP {connection.status}: {message}")

    async def _read(self, connection: ServerConnection) -> bytes:
        """Read the rest of an answer, and end its request. Raises UnavailableError."""
        try:
            return await connection.read_all()
        except OSError as error:
            raise self._broken(error) from error
        finally:
            self._pool.release(connection)

    async def _requested(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> ServerConnection:
        # Redirects are not followed: only configured servers get requests and the API key.
        try:
            return await self._pool.request(method, path, body, headers)
        except TimeoutError as error:
            raise UnavailableError(f"{self.url} did not respond in time") from error
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: OSError) -> UnavailableError:
        return UnavailableError(f"{self.url}: {error}")
