"""Client that requests a streamed completion and times the first two tokens."""

import time

import aiohttp
import msgspec

from twofold.errors import ConfigurationError

PATIENCE_S = 300.0


class Streamed(msgspec.Struct, frozen=True):
    """Tokens of a streamed answer, and the seconds from the request to the first and to the second token."""

    first_s: float
    second_s: float
    tokens: list[int]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []


async def ask(url: str, model: str, prompt: list[int], max_tokens: int) -> Streamed:
    """Send a greedy request and return the streamed answer. Raises ConfigurationError if the request fails."""
    try:
        return await _ask(url, model, prompt, max_tokens)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigurationError(f"{url} failed: {error!r}") from error


async def _ask(url: str, model: str, prompt: list[int], max_tokens: int) -> Streamed:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    came_s: list[float] = []
    began_s = time.monotonic()
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        if response.status != 200:
            raise ConfigurationError(f"{url} answers {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in msgspec.json.decode(line[6:], type=_Chunk).choices:
                    found = choice.token_ids or []
                    came_s += [time.monotonic() - began_s] * len(found)
                    tokens += found
    if len(tokens) != max_tokens:
        raise ConfigurationError(f"{url} gave {len(tokens)} tokens of {max_tokens}")
    return Streamed(came_s[0], came_s[1], tokens)
