"""`twofold serve --router conductor` end to end."""

import asyncio
import os
import random
import re
import signal

import aiohttp
import pytest

from support.api_client import all_blocks_free, complete_all, metric, served_name
from support.flags import ENGINE
from support.reference import greedy_outputs
from support.running_service import named, running_service
from twofold.bench.services import metrics

BLOCK, OUTPUT = 16, 8
SHARED, OWN = 60 * BLOCK, 1000
# Slow machines: a prompt of 2,000 tokens takes most of a second, and half of that with a cached prefix.
CLUSTER = """
model: llama2-70b
performance: fitted
router: conductor
handoff: layer-wise
pools:
  - {machines: 1, machine: dgx-a100, tensor_parallel: 2, instances: 2, role: prefill}
  - {machines: 1, machine: dgx-a100, tensor_parallel: 2, instances: 1, role: decode}
"""


def tokens(seed, count):
    draw = random.Random(seed)
    return [draw.randint(10, 500) for _ in range(count)]


async def ask(url, *prompts):
    """Send all prompts at once; return the number of cached tokens of each prompt."""

    async def one(session, name, prompt):
        body = {"model": name, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert answer["usage"]["completion_tokens"] == OUTPUT
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with aiohttp.ClientSession() as session:
        name = await served_name(session, url)
        return await asyncio.gather(*(one(session, name, prompt) for prompt in prompts))


def computed_on(url):
    """Return the number of prompt tokens that each prefill worker has received."""
    found = re.findall(
        r'^twofold:prefix_cache_queries_total\{instance="(prefill-\d)"\} (\S+)$', metrics(url), re.MULTILINE
    )
    return {instance: float(count) for instance, count in found}


def kill(process, instance):
    (victim,) = named(process, instance)
    os.kill(victim.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(CLUSTER)
    with running_service(None, "--engine", "emulated", "--enable-prefix-caching", "--cluster", str(path)) as made:
        yield made


@pytest.mark.covers(engine="emulated", feature="prefix")
def test_prompts_are_routed_to_their_cached_prefix(emulated):
    _, url = emulated
    begin = [tokens(f"begin {number}", SHARED) for number in range(4)]
    for number, prompt in enumerate(begin):
        assert asyncio.run(ask(url, prompt + tokens(f"first {number}", 40))) == [0]
    assert computed_on(url) == {"prefill-0": 2 * (SHARED + 40), "prefill-1": 2 * (SHARED + 40)}
    for number, prompt in enumerate(begin):
        assert asyncio.run(ask(url, prompt + tokens(f"second {number}", 40))) == [SHARED]
    assert metric(url, 'prefill_routes_total{reuse="own"}') == 4
    assert metric(url, 'prefill_routes_total{reuse="none"}') == 4


def test_a_busy_worker_with_the_prefix_is_bypassed(emulated):
    """A burst of prompts with one prefix goes to both prefill workers, although only one has the prefix cached."""
    _, url = emulated
    begin = tokens("in demand", SHARED)
    asyncio.run(ask(url, begin))
    before = computed_on(url)
    cached = asyncio.run(ask(url, *(begin + tokens(f"own {number}", OWN) for number in range(8))))
    given = {instance: count - before.get(instance, 0) for instance, count in computed_on(url).items()}
    assert sorted(given) == ["prefill-0", "prefill-1"]
    assert all(given.values())
    assert SHARED in cached
    assert asyncio.run(all_blocks_free(url))


def test_the_prefixes_of_a_killed_worker_are_recomputed(emulated):
    process, url = emulated
    begin, before = tokens("killed", SHARED), computed_on(url)
    asyncio.run(ask(url, begin))
    (has,) = [name for name, count in computed_on(url).items() if count > before.get(name, 0)]

    async def killed():
        asked = asyncio.create_task(ask(url, begin + tokens("under way", OWN)))
        await asyncio.sleep(0.2)
        kill(process, has)
        return await asked

    asyncio.run(killed())
    # Either worker may have computed the prefix last.
    assert asyncio.run(ask(url, begin + tokens("after", 40))) == [SHARED]
    assert asyncio.run(all_blocks_free(url))


def test_output_equals_the_models(tiny_model_dir):
    """The service generates the same tokens as transformers, even if a prefill worker is killed."""
    begin = [tokens(f"real {number}", 40 * BLOCK) for number in range(4)]
    prompts = [prompt + tokens(f"{number} {turn}", 30) for turn in range(4) for number, prompt in enumerate(begin)]
    expected = greedy_outputs(tiny_model_dir("llama"), prompts, OUTPUT)
    fields = {"max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    flags = ("--prefill", "2", "--decode", "1", "--router", "conductor")
    with running_service(tiny_model_dir("llama"), *ENGINE, *flags) as (process, url):
        assert asyncio.run(complete_all(url, prompts, at_once=1, **fields)) == expected
        assert metric(url, 'prefill_routes_total{reuse="own"}') == len(prompts) - len(begin)
        assert metric(url, "prefix_cache_hits_total") == 40 * BLOCK * (len(prompts) - len(begin))

        async def killed():
            asked = asyncio.create_task(complete_all(url, prompts, at_once=8, **fields))
            kill(process, "prefill-0")
            return await asked

        assert asyncio.run(killed()) == expected
        assert asyncio.run(all_blocks_free(url))
