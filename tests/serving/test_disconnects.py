"""Client disconnects leave no block or request behind."""

import asyncio
import json
import random
import time
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
import pytest

from support.api_client import all_blocks_free, complete, metric, served_name
from support.flags import COLOCATED, SPLIT

DISCONNECTS = 200
AT_ONCE = 12
OUTPUT = 200


async def leave(url, body, *, after_tokens=0, after_s=0.0):
    """Request a completion and disconnect after `after_tokens` tokens and `after_s` more seconds."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    sent = json.dumps(body).encode()
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n".encode())
    writer.write(sent)
    await writer.drain()
    seen = 0
    while seen < after_tokens:
        line = await reader.readline()
        assert line, "the stream ended before its client left"
        seen += line.startswith(b"data: ")
    await asyncio.sleep(after_s)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def occasions(draw, answer_s):
    """Yield keyword arguments for a client: whether to stream the response, and when to disconnect."""
    while True:
        yield {"stream": draw.random() < 0.5}
        # Mostly early: decode is by far the longest phase.
        yield {"stream": draw.random() < 0.5, "after_s": answer_s * draw.random() ** 3}
        yield {"stream": True, "after_tokens": 1}
        yield {"stream": True, "after_tokens": draw.randint(2, OUTPUT // 5)}


async def storm(url, disconnects, settled, seed):
    draw = random.Random(seed)
    async with aiohttp.ClientSession() as session:
        asking = {"max_tokens": OUTPUT, "ignore_eos": True}
        began = time.monotonic()
        await complete(session, url, [7] * 700, **asking)
        occasion = occasions(draw, time.monotonic() - began)
        name = await served_name(session, url)
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(stream=False, **when):
            prompt = [draw.randint(10, 500) for _ in range(draw.randint(1, 1500))]
            async with slots:
                await leave(url, {"model": name, "prompt": prompt, "stream": stream, **asking}, **when)

        await asyncio.gather(*(one(**next(occasion)) for _ in range(disconnects)))
        assert await settled(url), "blocks are still held after every client has gone"
        made = await complete(session, url, [11, 12, 13], max_tokens=5, ignore_eos=True)
        assert len(made) == 5, "the service must answer the next request"


COUNTERS = (
    "request_success_total",
    'request_success_total{finished_reason="abort"}',
    "time_to_first_token_seconds_count",
)


def check_disconnects(url, disconnects, settled=all_blocks_free):
    """Check that the service frees all KV blocks when clients disconnect, before or after the first token."""
    before = [metric(url, counter) for counter in COUNTERS]
    for seed in range(20):
        asyncio.run(storm(url, disconnects, settled, seed))
        counts = [metric(url, counter) - was for counter, was in zip(COUNTERS, before, strict=True)]
        ended, aborted, first_tokens = counts
        if 0 < ended - first_tokens < aborted:
            return
    raise AssertionError(
        f"none was aborted before, or none after, its first token: {dict(zip(COUNTERS, counts, strict=True))}"
    )


@pytest.mark.covers(engine="torch", feature="disconnects")
def test_disconnects_free_every_block_of_both_phases(service):
    check_disconnects(service("llama", SPLIT), DISCONNECTS)


def test_disconnects_free_every_block_of_colocated_workers(service):
    check_disconnects(service("llama", COLOCATED), 60)


def test_disconnects_free_every_block_of_pipelined_chunks(service):
    check_disconnects(service("llama", (*SPLIT, "--prefill-pp", "2", "--pipeline-chunk", "64")), 60)
