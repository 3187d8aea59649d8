"""A client of the completions API that sends and receives token ids, and functions that read a service's metrics."""

import asyncio
import random
import re
import time
from collections.abc import Sequence

import aiohttp

from twofold.bench.services import metrics


async def complete(session: aiohttp.ClientSession, url: str, prompt: list[int], **fields: object) -> list[int]:
    """Send a completion request and return the output token ids."""
    answer = await _answer(session, url, prompt, **fields)
    return list(answer["choices"][0]["token_ids"])


async def complete_cached(
    session: aiohttp.ClientSession, url: str, prompt: list[int], **fields: object
) -> tuple[list[int], int]:
    """Send a completion request and return the output token ids and the number of cached prompt tokens."""
    answer = await _answer(session, url, prompt, **fields)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def _answer(session: aiohttp.ClientSession, url: str, prompt: list[int], **fields: object) -> dict:
    body = {"model": await served_name(session, url), "prompt": prompt, "return_token_ids": True, **fields}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def served_name(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


async def complete_all(
    url: str, prompts: Sequence[list[int]], *, at_once: int, spread_s: float = 0.0, **fields: object
) -> list[list[int]]:
    """Send prompts concurrently, at most `at_once` at a time, and return the outputs."""
    waits = random.Random(0)
    slots = asyncio.Semaphore(at_once)

    async def one(session: aiohttp.ClientSession, prompt: list[int], wait_s: float) -> list[int]:
        await asyncio.sleep(wait_s)
        async with slots:
            return await complete(session, url, prompt, **fields)

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await asyncio.gather(*(one(session, p, waits.uniform(0, spread_s)) for p in prompts))


def block_counts(url: str) -> dict[str, dict[str, float]]:
    """Return the KV block counts from /metrics, by instance and state."""
    counts: dict[str, dict[str, float]] = {}
    pattern = re.compile(r'^twofold:kv_cache_blocks\{instance="([^"]+)",state="([^"]+)"\} (\S+)$', re.MULTILINE)
    for instance, state, value in pattern.findall(metrics(url)):
        counts.setdefault(instance, {})[state] = float(value)
    return counts


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples; `name` may include labels."""
    lines = metrics(url).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"twofold:{name}"))


def metric_reaches(url: str, name: str, least: float, *, tries: int = 6000, pause_s: float = 0.1) -> bool:
    """Wait until a metric is at least `least`; return False on timeout."""
    for _ in range(tries):
        if metric(url, name) >= least:
            return True
        time.sleep(pause_s)
    return False


def metric_falls(url: str, name: str, most: float, *, tries: int = 6000, pause_s: float = 0.1) -> bool:
    """Wait until a metric is at most `most`; return False on timeout."""
    for _ in range(tries):
        if metric(url, name) <= most:
            return True
        time.sleep(pause_s)
    return False


async def all_blocks_free(url: str, *, tries: int = 6000, pause_s: float = 0.1) -> bool:
    """Wait until all KV blocks of all instances are free; return False on timeout."""
    for _ in range(tries):
        counts = await asyncio.to_thread(block_counts, url)
        if counts and all(c["free"] == c["total"] and c["in_flight"] == 0 for c in counts.values()):
            return True
        await asyncio.sleep(pause_s)
    return False
