"""Prompts that begin as others did, found in the store of the host: the same tokens, whatever becomes of the store."""

import asyncio
import os
import random
import signal
import time

import aiohttp
import pytest

from support.api_client import all_blocks_free, complete_all, metric, served_name
from support.flags import COLOCATED, ENGINE, SPLIT
from support.reference import greedy_outputs
from support.running_service import children, running_service

BLOCK, OUTPUT = 16, 8
BLOCK_BYTES = 24576  # of the tiny llama
GREEDY = {"max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}


def tokens(seed, count):
    draw = random.Random(seed)
    return [draw.randint(10, 500) for _ in range(count)]


async def ask(url, prompt):
    """The output tokens of one completion, and how many tokens of its prompt were cached."""
    async with aiohttp.ClientSession() as session:
        body = {
            "model": await served_name(session, url),
            "prompt": prompt,
            "return_token_ids": True,
            **GREEDY,
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["token_ids"], cached


def until(happens):
    for _ in range(1200):
        if happens():
            return
        time.sleep(0.1)
    raise AssertionError("it does not happen")


def kill(process, name):
    """End a process of the service, and wait for the one that takes its place."""
    (before,) = [child.pid for child in children(process) if child.name() == name]
    os.kill(before, signal.SIGKILL)
    until(lambda: any(child.name() == name and child.pid != before for child in children(process)))


def moved(url, way):
    """Blocks that went this way."""
    return metric(url, f'kv_store_bytes_total{{host="home",way="{way}"}}') / BLOCK_BYTES


def hits(url, tier):
    return metric(url, f'kv_store_hits_total{{host="home",tier="{tier}"}}')


def test_cold_local_stored_and_read_from_disk(tiny_model_dir, tmp_path):
    """The same tokens from all of them, and each is where it was to be found."""
    prompt = tokens("stored", 40 * BLOCK + 5)
    (expected,) = greedy_outputs(tiny_model_dir("llama"), [prompt], OUTPUT)
    store = ("--kv-store-dram", "4MiB", "--kv-store-disk", f"{tmp_path / 'kv'}:8MiB", "--kv-checksums")
    with running_service(tiny_model_dir("llama"), *ENGINE, *SPLIT, *store) as (process, url):
        assert asyncio.run(ask(url, prompt)) == (expected, 0)
        assert asyncio.run(ask(url, prompt)) == (expected, 40 * BLOCK)
        assert hits(url, "memory") == hits(url, "disk") == 0
        until(lambda: moved(url, "disk_written") >= 40)
        kill(process, "prefill-0")
        assert asyncio.run(ask(url, prompt)) == (expected, 40 * BLOCK)
        until(lambda: hits(url, "memory") >= 40)
        kill(process, "store")
        kill(process, "prefill-0")
        assert asyncio.run(ask(url, prompt)) == (expected, 40 * BLOCK)
        until(lambda: hits(url, "disk") >= 40)
        assert asyncio.run(all_blocks_free(url))
    with running_service(tiny_model_dir("llama"), *ENGINE, *SPLIT, *store) as (_, url):
        assert asyncio.run(ask(url, prompt)) == (expected, 40 * BLOCK), "the disk outlives the service"


@pytest.mark.parametrize("flags", [SPLIT, COLOCATED], ids=["split", "colocated"])
def test_the_store_may_die_at_any_time(flags, tiny_model_dir, tmp_path):
    """Requests go on, and compute what they do not find; engine memory is so small that much is asked of the store."""
    begin = tokens("begin", 10 * BLOCK)
    prompts = [begin + tokens(f"end {number % 12}", 12 * BLOCK) for number in range(60)]
    expected = greedy_outputs(tiny_model_dir("llama"), prompts, OUTPUT)
    tight = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "1536KiB")
    store = ("--kv-store-dram", "4MiB", "--kv-store-disk", f"{tmp_path / 'kv'}:8MiB", "--kv-checksums")
    with running_service(tiny_model_dir("llama"), *tight, *flags, *store) as (process, url):

        async def run():
            asked = asyncio.create_task(complete_all(url, prompts, at_once=6, spread_s=6.0, **GREEDY))
            while not asked.done():
                await asyncio.sleep(1.0)
                await asyncio.to_thread(kill, process, "store")
            return await asked

        assert asyncio.run(run()) == expected
        # What the last life of the store has is more than the engine has.
        for _ in range(2):
            assert asyncio.run(complete_all(url, prompts[:12], at_once=6, **GREEDY)) == expected[:12]
        until(lambda: moved(url, "loaded") > 0)
        assert asyncio.run(all_blocks_free(url))
        assert sum(path.stat().st_size for path in (tmp_path / "kv").iterdir()) <= 8 << 20
