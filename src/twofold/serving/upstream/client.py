"""Asks one vLLM server. Whoever stops listening to an answer closes its connection, which ends the request there."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from twofold.errors import TwofoldError
from twofold.serving.upstream import api

CONNECT_S = 5.0
# What is wrong with a request and would be on any server; all else that is not a 200 is the server's trouble.
_REFUSALS = (400, 413, 422)
_OK = 200
_DATA, _DONE = b"data:", b"[DONE]"
_LINE_BYTES = 1 << 24  # the first event of a stream repeats the prompt


class UnavailableError(TwofoldError):
    """A server cannot be reached, broke off, or cannot answer anybody now."""


class RejectedError(TwofoldError):
    """A server finds fault with a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerModel(msgspec.Struct, frozen=True):
    """What a server says of its model; `id` is its name there."""

    id: str
    max_model_len: int


class _Cards(msgspec.Struct, frozen=True):
    data: list[ServerModel]


class VllmClient:
    """One server at `url`; its `session` is shared with others. Times out only where it is said."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def complete(self, body: bytes) -> api.Completion:
        """A whole answer; raises TroubleError, RefusedError and `api.ServerError`."""
        async with self._answer("POST", "/v1/completions", body) as response:
            return api.read(await response.read())

    async def stream(self, body: bytes) -> AsyncGenerator[api.Completion, None]:
        """The events of a stream until its end; raises as `complete` does, and TroubleError where it breaks off."""
        done = False
        async with self._answer("POST", "/v1/completions", body) as response:
            # To the end, so that the connection can be used again. An event is one line, and an empty one.
            async for line in response.content:
                data = line.removeprefix(_DATA).strip()
                done = done or data == _DONE
                if data and not done:
                    yield api.read(data)
        if not done:
            raise UnavailableError(f"{self.url} broke off in the middle of a stream")

    async def card(self, timeout_s: float) -> ServerModel:
        """What it serves; raises TroubleError."""
        body = await self._get("/v1/models", timeout_s)
        try:
            return msgspec.json.decode(body, type=_Cards).data[0]
        except (msgspec.DecodeError, IndexError) as error:
            raise UnavailableError(f"{self.url} does not say what it serves") from error

    async def check_health(self, timeout_s: float) -> None:
        """Raises TroubleError where it does not say, within `timeout_s`, that it is well."""
        await self._get("/health", timeout_s)

    async def metrics(self, timeout_s: float) -> str:
        """Its Prometheus exposition; raises TroubleError."""
        return (await self._get("/metrics", timeout_s)).decode(errors="replace")

    async def _get(self, path: str, timeout_s: float) -> bytes:
        try:
            async with self._answer("GET", path, timeout_s=timeout_s) as response:
                return await response.read()
        except RejectedError as error:
            raise UnavailableError(f"{self.url}{path}: {error}") from error

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """A 200, whose connection is closed where it was not read to its end."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=body,
                headers=headers,
                timeout=timeout,
                read_bufsize=_LINE_BYTES,
            ) as response:
                if response.status != _OK:
                    message = api.error_text(await response.read())
                    if response.status in _REFUSALS:
                        raise RejectedError(response.status, message)
                    raise UnavailableError(f"{self.url} answers HTTP {response.status}: {message}")
                yield response
        except TimeoutError as error:
            raise UnavailableError(f"{self.url} does not answer") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UnavailableError(f"{self.url}: {error or type(error).__name__}") from error
