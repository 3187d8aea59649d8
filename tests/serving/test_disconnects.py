"""Clients that go away: nothing stays behind."""

import asyncio
import random
from contextlib import suppress

import aiohttp

from support.api_client import all_blocks_free, complete, served_name
from support.flags import COLOCATED, SPLIT

DISCONNECTS = 200


async def leave(session, url, name, prompt, stay_s, stream):
    """Begin a completion and drop the connection after `stay_s` seconds; whether a token was seen before."""
    seen = False
    body = {"model": name, "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": stream}

    async def read():
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200
            nonlocal seen
            async for _ in response.content:
                seen = True

    with suppress(TimeoutError):
        await asyncio.wait_for(read(), stay_s)
    return seen


async def storm(url, disconnects, seed=5):
    draw = random.Random(seed)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        name = await served_name(session, url)
        slots = asyncio.Semaphore(12)

        async def one():
            prompt = [draw.randint(10, 500) for _ in range(draw.randint(1, 1500))]
            # From at once (still queued or in prefill) over the hand-off into the decode.
            stay_s = draw.choice([0.002, 0.02, 0.1, 0.4]) * draw.uniform(0.5, 2)
            async with slots:
                return await leave(session, url, name, prompt, stay_s, stream=draw.random() < 0.7)

        seen = await asyncio.gather(*(one() for _ in range(disconnects)))
        early = disconnects - sum(seen)
        assert min(early, sum(seen)) > disconnects // 10, "some leave before the first token, some after"
        assert await all_blocks_free(url), "blocks are still held after every client has gone"
        made = await complete(session, url, [11, 12, 13], max_tokens=5, ignore_eos=True)
        assert len(made) == 5, "the next request is answered"


def test_disconnects_at_any_moment_free_every_block_on_both_sides(service):
    """200 clients leave in the queue, in prefill, in the hand-off and in decode."""
    asyncio.run(storm(service("llama", SPLIT), DISCONNECTS))


def test_disconnects_free_every_block_of_colocated_workers(service):
    """The same without a hand-off."""
    asyncio.run(storm(service("llama", COLOCATED), 60))
