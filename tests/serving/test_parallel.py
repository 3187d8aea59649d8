"""Workers with several ranks, and hand-offs between different degrees of parallelism."""

import asyncio
import os
import random
import signal

import aiohttp
import pytest

from support.api_client import all_blocks_free, complete, complete_all
from support.flags import ENGINE
from support.reference import greedy_outputs
from support.running_service import named, running_service

OUTPUT = 8
TP, PP = ("--prefill-tp", "--decode-tp"), ("--prefill-pp", "--decode-pp")
WAYS = [  # architecture, flags
    ("llama", (TP[1], "2")),
    ("llama", (TP[0], "2", "--handoff", "pull")),
    ("llama", (PP[1], "2", "--handoff", "serialized")),
    ("opt", (TP[1], "2", "--handoff", "pull")),
    ("opt", (TP[0], "2")),
    ("opt", (PP[1], "2")),
    ("opt", (PP[0], "2", TP[1], "2")),
    ("llama", (PP[0], "2", "--pipeline-chunk", "64")),
    ("opt", (PP[0], "2", TP[0], "2", "--pipeline-chunk", "100", "--handoff", "pull")),
    ("llama", ("--colocated", "1", "--tp", "2")),
]


def prompts(count=24):
    draw = random.Random(4)
    lengths = [1, 15, 16, 17, 900] + [round(900 ** draw.random()) for _ in range(count - 5)]
    return [[draw.randint(10, 500) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    known = {}

    def outputs(arch):
        if arch not in known:
            known[arch] = greedy_outputs(tiny_model_dir(arch), prompts(), OUTPUT)
        return known[arch]

    return outputs


@pytest.mark.covers(engine="torch", model=("llama", "opt"), feature=("handoff", "tp", "pp", "pipeline-chunks"))
@pytest.mark.parametrize(
    ("arch", "flags"), WAYS, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_output_equals_generate_across_degrees(arch, flags, tiny_model_dir, expected):
    """Outputs equal those of transformers' `generate` for every parallelism and hand-off mode."""
    with running_service(tiny_model_dir(arch), *ENGINE, *flags) as (_, url):
        made = asyncio.run(complete_all(url, prompts(), at_once=12, max_tokens=OUTPUT, temperature=0, ignore_eos=True))
        assert made == expected(arch)
        assert asyncio.run(all_blocks_free(url))


@pytest.fixture(scope="module")
def of_ranks(tiny_model_dir):
    """Yield a service with two pipeline ranks for prefill and two tensor-parallel ranks for decode."""
    with running_service(tiny_model_dir("llama"), *ENGINE, PP[0], "2", TP[1], "2") as running:
        yield running


@pytest.mark.covers(engine="torch", model="llama", feature="replay")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_failed_rank_restarts_its_worker(of_ranks, number):
    """Streams stay complete and unchanged when one rank of the decode worker is killed or stopped."""
    process, url = of_ranks

    def ranks(name):
        return {child.pid for child in named(process, f"{name}.*")}

    async def watch():
        fields = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": 6}
        async with aiohttp.ClientSession() as session:
            whole = await complete(session, url, [5, 6, 7] * 30, **fields)
            before = ranks("decode-0")
            (hit,) = ranks("decode-0.1")
            streams = [asyncio.create_task(complete(session, url, [5, 6, 7] * 30, **fields)) for _ in range(3)]
            await asyncio.sleep(0.1)
            os.kill(hit, number)
            assert await asyncio.gather(*streams) == [whole] * 3
            after = ranks("decode-0")
            assert len(after) == 2
            assert not after & before, "the other rank must be killed too"

    asyncio.run(asyncio.wait_for(watch(), 600))
    assert asyncio.run(all_blocks_free(url))


def test_a_failed_stage_restarts_its_worker_with_chunks_in_flight(tiny_model_dir):
    """Streams stay complete when a pipeline stage of the prefill worker is killed during prefill."""
    # Without the first prompt's cached blocks, the others are computed in full.
    flags = ("--prefill-pp", "2", "--pipeline-chunk", "32", "--no-enable-prefix-caching")
    with running_service(tiny_model_dir("llama"), *ENGINE, *flags) as (process, url):

        async def watch():
            fields = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 6}
            async with aiohttp.ClientSession() as session:
                whole = await complete(session, url, [5, 6, 7] * 400, **fields)
                (hit,) = (child.pid for child in named(process, "prefill-0.1"))
                streams = [asyncio.create_task(complete(session, url, [5, 6, 7] * 400, **fields)) for _ in range(6)]
                await asyncio.sleep(0.1)
                os.kill(hit, signal.SIGKILL)
                assert await asyncio.gather(*streams) == [whole] * 6

        asyncio.run(asyncio.wait_for(watch(), 600))
        assert asyncio.run(all_blocks_free(url))
