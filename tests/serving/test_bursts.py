"""Tests of bursts of prompts that need more KV memory than the workers have."""

import asyncio
import random

import pytest

from support.api_client import all_blocks_free, block_counts, complete_all, metric
from support.flags import COLOCATED, SPLIT

PULL = (*SPLIT, "--handoff", "pull")
# The longest requests take half of the 64 KV blocks.
TIGHT = ("--max-model-len", "512", "--kv-cache-memory-bytes", "1536KiB", "--max-num-seqs", "16")
SWAP = (*TIGHT, "--swap-space", "16MiB")
WAYS = [
    pytest.param((*SPLIT, *SWAP), id="layer-wise"),
    pytest.param(("--colocated", "1", *SWAP), id="colocated"),
    pytest.param((*PULL, *SWAP), id="pull"),
]
HOW = {"max_tokens": 300, "temperature": 0.8, "seed": 3, "ignore_eos": True}


def prompts(count):
    draw = random.Random(7)
    return [[draw.randint(10, 500) for _ in range(draw.randint(10, 100))] for _ in range(count)]


@pytest.fixture(scope="module")
def expected(service):
    """Return reference outputs of a service with enough KV memory for all 14 prompts."""
    return asyncio.run(complete_all(service("llama", COLOCATED), prompts(14), at_once=14, **HOW))


@pytest.mark.covers(engine="torch", model="llama", feature="preemption")
@pytest.mark.parametrize("flags", WAYS)
def test_swapping_does_not_change_the_output(flags, service, expected):
    url = service("llama", flags)
    assert asyncio.run(complete_all(url, prompts(14), at_once=14, **HOW)) == expected
    assert metric(url, "swaps_total") > 0
    assert metric(url, "swap_blocks_moved_total") > 0
    assert asyncio.run(all_blocks_free(url))
    assert metric(url, 'num_requests{instance="decode-0",state="swapped"}') == 0


def test_pull_keeps_kv_on_the_prefill_worker_until_decode_has_room(service):
    url = service("llama", (*PULL, *TIGHT))
    some = prompts(16)
    looks = []

    async def look():
        while True:
            counts = await asyncio.to_thread(block_counts, url)
            held = await asyncio.to_thread(metric, url, 'num_requests{instance="prefill-0",state="handing_off"}')
            looks.append((held, counts["decode-0"]["free"], counts["decode-0"]["total"]))
            await asyncio.sleep(0.05)

    async def burst():
        looking = asyncio.create_task(look())
        made = await complete_all(url, some, at_once=16, **HOW)
        looking.cancel()
        return made

    made = asyncio.run(burst())
    assert [len(tokens) for tokens in made] == [300] * 16
    assert max(held for held, _, _ in looks) >= 8
    assert all(0 <= free <= total for _, free, total in looks)
    assert min(free for _, free, _ in looks) < 20
    assert asyncio.run(all_blocks_free(url))
    assert metric(url, 'num_requests{instance="prefill-0",state="handing_off"}') == 0


def test_disconnects_free_swapped_blocks(service):
    url = service("llama", (*PULL, *SWAP))

    async def leave():
        await asyncio.wait_for(complete_all(url, prompts(14), at_once=14, **HOW), 0.7)

    for _ in range(3):
        with pytest.raises(TimeoutError):
            asyncio.run(leave())
    assert asyncio.run(all_blocks_free(url))
    assert metric(url, 'swap_blocks{instance="decode-0",state="free"}') == metric(
        url, 'swap_blocks{instance="decode-0",state="total"}'
    )
