"""All hand-off modes give the same output and free every block."""

import asyncio
import random
import re

import aiohttp
import pytest

from support.api_client import all_blocks_free, complete_all, metric_reaches, served_name
from support.flags import COLOCATED, SPLIT
from support.transports import NIXL
from twofold.bench.services import metrics

PULL = ("--handoff", "pull")
OVER_NIXL = ("--transport", "nixl")
CHECKED = ("--kv-checksums",)
WAYS = [
    pytest.param((*PULL, *CHECKED), id="shared memory, pull, checksums"),
    pytest.param((*OVER_NIXL, *CHECKED), id="nixl, layer-wise, checksums", marks=NIXL),
    pytest.param((*OVER_NIXL, *PULL), id="nixl, pull", marks=NIXL),
]
HOW = {"max_tokens": 16, "temperature": 0.8, "seed": 5, "ignore_eos": True}


def prompts(count, seed):
    draw = random.Random(seed)
    return [[draw.randint(10, 500) for _ in range(draw.randint(1, 900))] for _ in range(count)]


@pytest.mark.covers(engine="torch", model="llama", transport=("shared_memory", "nixl"), feature="handoff")
@pytest.mark.covers(engine="torch", feature=("pull", "checksums"))
@pytest.mark.parametrize("flags", WAYS)
def test_output_equals_that_of_a_colocated_service(flags, service):
    some = prompts(30, seed=1)
    expected = asyncio.run(complete_all(service("llama", COLOCATED), some, at_once=8, **HOW))
    url = service("llama", (*SPLIT, *flags))
    made = asyncio.run(complete_all(url, some, at_once=30, spread_s=0.5, **HOW))
    assert made == expected
    assert asyncio.run(all_blocks_free(url))
    assert metric_reaches(url, "kv_transfer_seconds_count", len(some)), "all were handed off"


@pytest.mark.parametrize("flags", WAYS)
def test_disconnects_free_every_block(flags, service):
    url = service("llama", (*SPLIT, *flags))
    draw = random.Random(2)

    async def leave(session, name, prompt, after_s):
        body = {"model": name, "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            try:
                await asyncio.wait_for(response.content.read(), after_s)
            except TimeoutError:
                response.close()

    async def run():
        async with aiohttp.ClientSession() as session:
            name = await served_name(session, url)
            await asyncio.gather(
                *(leave(session, name, p, draw.uniform(0, 1)) for p in prompts(30, seed=3)), return_exceptions=True
            )
        return await all_blocks_free(url)

    assert asyncio.run(run())


def test_links_and_prefill_are_measured_before_readiness(service):
    shown = metrics(service("llama", (*SPLIT, *WAYS[0].values[0])))
    for name in (
        'kv_link_bytes_per_second{source="prefill-0",target="decode-0"}',
        'kv_link_overhead_seconds{source="prefill-0",target="decode-0"}',
        'prefill_seconds_per_token{instance="prefill-0"}',
        'handoff_crossover_tokens{instance="prefill-0"}',
    ):
        (value,) = re.findall(f"^twofold:{re.escape(name)} (\\S+)$", shown, re.MULTILINE)
        assert float(value) > 0
    assert 'source="decode-0"' not in shown, "decode workers hand nothing over"
