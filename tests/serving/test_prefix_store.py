"""Reuse of prefixes from the KV store of a host."""

import asyncio

import pytest

from support.api_client import all_blocks_free, complete_all
from support.flags import COLOCATED, ENGINE, SPLIT
from support.reference import greedy_outputs
from support.running_service import running_service
from support.stored_prompts import BLOCK, GREEDY, OUTPUT, ask, hits, kill, moved, tokens
from support.waiting import until


@pytest.mark.covers(engine="torch", model="llama", feature="store")
def test_the_same_tokens_from_every_tier(tiny_model_dir, tmp_path):
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
        assert asyncio.run(ask(url, prompt)) == (expected, 40 * BLOCK), "the disk tier must outlive the service"


@pytest.mark.parametrize("flags", [SPLIT, COLOCATED], ids=["split", "colocated"])
def test_requests_survive_a_killed_store(flags, tiny_model_dir, tmp_path):
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
        # The store must hold more than the engine does.
        for _ in range(2):
            assert asyncio.run(complete_all(url, prompts[:12], at_once=6, **GREEDY)) == expected[:12]
        until(lambda: moved(url, "loaded") > 0)
        assert asyncio.run(all_blocks_free(url))
        assert sum(path.stat().st_size for path in (tmp_path / "kv").iterdir()) <= 8 << 20
