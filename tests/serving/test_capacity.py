"""KV capacity limits of engine memory, host store and disk."""

import asyncio
import random
import re

from support.api_client import all_blocks_free, complete_all
from support.flags import SPLIT
from support.running_service import named, running_service
from support.sizes import disk_bytes, largest, shared_bytes
from twofold.bench.services import metrics
from twofold.transport.base import SCRATCH_BYTES

BLOCK, BLOCK_BYTES = 16, 24576  # of the tiny llama
ENGINE_BYTES, STORE_BYTES, DISK_BYTES = 1536 << 10, 3 << 20, 5 << 20
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
GAUGE = re.compile(r'^twofold:(kv_\w+)\{(?:host|instance)="([^"]+)",(?:tier|state)="([^"]+)"\} (\S+)$', re.MULTILINE)


def prompts(count):
    """Return `count` random prompts, some of which share a prefix."""
    draw = random.Random(7)
    begins = [[draw.randint(10, 500) for _ in range(8 * BLOCK)] for _ in range(12)]
    return [begins[n % 12] + [draw.randint(10, 500) for _ in range(20 * BLOCK)] for n in range(count)]


def told(url):
    """Return all KV block gauges from /metrics."""
    return {tuple(match[:3]): float(match[3]) for match in GAUGE.findall(metrics(url))}


def test_capacity_is_never_exceeded(tiny_model_dir, tmp_path):
    """KV memory and disk usage stay within their limits under load while the store restarts."""
    disk = tmp_path / "kv"
    tight = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", str(ENGINE_BYTES))
    store = ("--kv-store-dram", str(STORE_BYTES), "--kv-store-disk", f"{disk}:{DISK_BYTES}")
    with (
        running_service(tiny_model_dir("llama"), *tight, *SPLIT, *store) as (process, url),
        largest(lambda: shared_bytes(process), lambda: {"disk": disk_bytes(disk)}, lambda: told(url)) as most,
    ):

        async def load():
            kept = {"prompt_cache_retention": "24h"}
            for number, fields in enumerate(({}, kept, {}, kept)):
                asked = prompts(160)[40 * number : 40 * (number + 1)]
                await complete_all(url, asked, at_once=6, **GREEDY, **fields)
                for child in named(process, "store"):
                    child.kill()

        asyncio.run(load())
        assert asyncio.run(all_blocks_free(url))
    memory, on_disk, blocks = most
    assert set(memory) == {"prefill-0", "decode-0", "store"}
    assert max(memory["prefill-0"], memory["decode-0"]) <= ENGINE_BYTES + SCRATCH_BYTES
    assert memory["store"] <= STORE_BYTES
    assert 0 < on_disk["disk"] <= DISK_BYTES
    for (name, whose, part), value in blocks.items():
        if name == "kv_cache_blocks":
            assert value <= blocks[name, whose, "total"] <= ENGINE_BYTES // BLOCK_BYTES
        if name == "kv_store_blocks":
            assert value <= blocks["kv_store_capacity_blocks", whose, part]
    assert blocks["kv_store_capacity_blocks", "home", "memory"] <= STORE_BYTES // BLOCK_BYTES
    assert blocks["kv_store_capacity_blocks", "home", "disk"] <= DISK_BYTES // BLOCK_BYTES
    # The disk tier was full.
    assert blocks["kv_store_blocks", "home", "disk"] == blocks["kv_store_capacity_blocks", "home", "disk"]
    assert blocks["kv_cache_blocks", "prefill-0", "cached"] > blocks["kv_cache_blocks", "prefill-0", "total"] / 2
