"""HTTP client of a vLLM server. Closing a response early closes the connection, which aborts the request there."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from twofold.errors import TwofoldError
from twofold.serving.upstream import api

CONNECT_S = 5.0
# Statuses of invalid requests; all other errors are the server's.
_REFUSALS = (400, 413, 422)
_OK = 200
_DATA, _DONE = b"data:", b"[DONE]"
_LINE_BYTES = 1 << 24  # the first event of a stream repeats the prompt


class UnavailableError(TwofoldError):
    """A server is unreachable, closed the connection, or cannot serve requests."""


class RejectedError(TwofoldError):
    """A server rejects a request as invalid."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerModel(msgspec.Struct, frozen=True):
    """A server's model card; `id` is the model's name there."""

    id: str
    max_model_len: int


class _Cards(msgspec.Struct, frozen=True):
    data: list[ServerModel]


class VllmClient:
    """Client of one server at `url`. The `session` is shared; only calls with `timeout_s` time out."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def complete(self, body: bytes) -> api.Completion:
        """Request a whole response; raises UnavailableError, RejectedError and ServerError."""
        async with self._answer("POST", "/v1/completions", body) as response:
            return api.read(await response.read())

    async def stream(self, body: bytes) -> AsyncGenerator[api.Completion, None]:
        """Yield the events of a stream; raises like `complete`, and UnavailableError if the stream is cut off."""
        done = False
        async with self._answer("POST", "/v1/completions", body) as response:
            # Read to the end, so that the connection can be reused. An event is a line and an empty one.
            async for line in response.content:
                data = line.removeprefix(_DATA).strip()
                done = done or data == _DONE
                if data and not done:
                    yield api.read(data)
        if not done:
            raise UnavailableError(f"{self.url} closed the connection during a stream")

    async def card(self, timeout_s: float) -> ServerModel:
        """Query the served model; raises UnavailableError."""
        body = await self._get("/v1/models", timeout_s)
        try:
            return msgspec.json.decode(body, type=_Cards).data[0]
        except (msgspec.DecodeError, IndexError) as error:
            raise UnavailableError(f"{self.url} returned no model list") from error

    async def check_health(self, timeout_s: float) -> None:
        """Raise UnavailableError unless the server is healthy within `timeout_s`."""
        await self._get("/health", timeout_s)

    async def metrics(self, timeout_s: float) -> str:
        """Query the Prometheus metrics; raises UnavailableError."""
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
        """Open a successful response; the connection is closed unless the response is read to its end."""
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
                    raise UnavailableError(f"{self.url} returned HTTP {response.status}: {message}")
                yield response
        except TimeoutError as error:
            raise UnavailableError(f"{self.url} did not respond in time") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UnavailableError(f"{self.url}: {error or type(error).__name__}") from error
