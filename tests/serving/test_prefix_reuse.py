"""Prefix caching skips the computation of cached prefixes and changes no output token."""

import asyncio
import os
import random
import signal

import aiohttp
import pytest

from support.api_client import all_blocks_free, complete, complete_all, complete_cached, metric
from support.flags import COLOCATED, ENGINE, SPLIT
from support.reference import greedy_outputs
from support.running_service import named, running_service
from twofold.bench.services import metrics

BLOCK, OUTPUT = 16, 8
GREEDY = {"max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
SAMPLED = {"max_tokens": OUTPUT, "temperature": 0.9, "top_p": 0.95, "seed": 5, "ignore_eos": True}
# 64 blocks of KV.
TIGHT = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "1536KiB")


def tokens(seed, count):
    draw = random.Random(seed)
    return [draw.randint(10, 500) for _ in range(count)]


def family(seed):
    """Return prompts that share prefixes of various lengths with a long prompt."""
    whole = tokens(seed, 40 * BLOCK)
    kept = (1, BLOCK, BLOCK + 1, 20 * BLOCK - 1, 20 * BLOCK, len(whole) - 1, len(whole))
    tails = [whole[:count] + tokens(f"{seed} {count}", 30) for count in kept]
    return [whole, *tails, whole, whole[: 20 * BLOCK], whole[: 20 * BLOCK + 5]]


async def ask(url, prompt, key=None, **fields):
    """Send one completion request and return its output tokens and its number of cached prompt tokens."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        return await complete_cached(session, url, prompt, **fields)


async def ask_in_turn(url, prompts, **fields):
    return [await ask(url, prompt, **fields) for prompt in prompts]


def shared_with_earlier(prompts):
    """Return how many tokens of each prompt can be reused from earlier prompts."""
    found = []
    for number, prompt in enumerate(prompts):
        best = 0
        for other in prompts[:number]:
            same = 0
            while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
                same += 1
            best = max(best, same // BLOCK * BLOCK)
        found.append(min(best, len(prompt) - 1))  # the last token is always computed
    return found


@pytest.mark.covers(engine="torch", model=("llama", "gemma2"), feature="prefix")
@pytest.mark.parametrize("flags", [SPLIT, COLOCATED], ids=["split", "colocated"])
@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_cached_prefixes_are_reused_without_changing_the_output(arch, flags, service, tiny_model_dir):
    url = service(arch, flags)
    prompts = family(f"greedy {arch} {flags}")
    made = asyncio.run(ask_in_turn(url, prompts, **GREEDY))
    assert [each for each, _ in made] == greedy_outputs(tiny_model_dir(arch), prompts, OUTPUT)
    assert [cached for _, cached in made] == shared_with_earlier(prompts)
    prompts = family(f"sampled {arch} {flags}")[:8]
    alone = [asyncio.run(ask(url, prompt, **SAMPLED))[0] for prompt in reversed(prompts)]
    assert [each for each, _ in asyncio.run(ask_in_turn(url, prompts, **SAMPLED))] == alone[::-1]
    assert asyncio.run(all_blocks_free(url))


def test_concurrent_prompts_share_prefixes(service, tiny_model_dir):
    prompts = [prompt for seed in range(3) for prompt in family(f"at once {seed}")]
    random.Random(1).shuffle(prompts)
    expected = greedy_outputs(tiny_model_dir("llama"), prompts, OUTPUT)
    for flags in (SPLIT, COLOCATED):
        url = service("llama", flags)
        assert asyncio.run(complete_all(url, prompts, at_once=12, **GREEDY)) == expected
        assert asyncio.run(all_blocks_free(url))


@pytest.mark.parametrize(
    "flags",
    [
        ("--prefill-tp", "2", "--decode-pp", "2"),
        ("--prefill-pp", "2", "--handoff", "pull"),
        ("--prefill-pp", "2", "--pipeline-chunk", "100"),
        ("--router", "splitwise"),
        ("--colocated", "1", "--no-enable-chunked-prefill", "--handoff", "serialized"),
    ],
    ids=" ".join,
)
def test_prefix_reuse_across_parallelism_and_routers(flags, tiny_model_dir):
    prompts = family("ranks")
    with running_service(tiny_model_dir("llama"), *ENGINE, *flags) as (_, url):
        made = asyncio.run(ask_in_turn(url, prompts, **GREEDY))
        assert [each for each, _ in made] == greedy_outputs(tiny_model_dir("llama"), prompts, OUTPUT)
        assert [cached for _, cached in made] == shared_with_earlier(prompts)
        assert asyncio.run(all_blocks_free(url))


@pytest.fixture(scope="module")
def split_tight(tiny_model_dir):
    """Yield the process and the URL of a service with separate prefill and decode workers and little KV memory."""
    with running_service(tiny_model_dir("llama"), *TIGHT, *SPLIT) as running:
        yield running


@pytest.fixture(scope="module")
def mixed_tight(tiny_model_dir):
    """Yield the process and the URL of a service with one worker that has swap space and little KV memory."""
    flags = ("--colocated", "1", "--swap-space", "16MiB")
    with running_service(tiny_model_dir("llama"), *TIGHT, *flags) as running:
        yield running


@pytest.fixture(params=["split_tight", "mixed_tight"])
def tight(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def more_than_fits(tiny_model_dir):
    """Return prompts that exceed the KV memory, and their expected outputs."""
    prompts = [prompt[:400] for seed in range(4) for prompt in family(f"tight {seed}")]
    random.Random(2).shuffle(prompts)
    return prompts, greedy_outputs(tiny_model_dir("llama"), prompts, 40)


def test_output_is_unchanged_under_memory_pressure(tight, more_than_fits):
    _, url = tight
    prompts, expected = more_than_fits
    counters = ("prefix_cache_hits_total", "prefix_cache_evictions_total")
    before = [metric(url, counter) for counter in counters]
    assert asyncio.run(complete_all(url, prompts, at_once=10, **GREEDY | {"max_tokens": 40})) == expected
    assert all(metric(url, counter) > was for counter, was in zip(counters, before, strict=True))
    assert asyncio.run(all_blocks_free(url))


def test_aborted_prompts_leave_only_complete_blocks(service, tiny_model_dir):
    prompts = [tokens(f"given up {number}", 1500) for number in range(6)]
    expected = greedy_outputs(tiny_model_dir("llama"), prompts, OUTPUT)

    async def leave_and_ask(url):
        async with aiohttp.ClientSession() as session:
            for number, prompt in enumerate(prompts):
                asked = asyncio.create_task(complete(session, url, prompt, **GREEDY))
                await asyncio.sleep(0.02 * number)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
            return await asyncio.gather(*(complete(session, url, prompt, **GREEDY) for prompt in prompts))

    for flags in (SPLIT, COLOCATED):
        url = service("llama", flags)
        assert asyncio.run(leave_and_ask(url)) == expected
        assert asyncio.run(all_blocks_free(url))


def test_api_keys_share_no_prefixes(tiny_model_dir):
    prompt = tokens("tenants", 30 * BLOCK + 1)
    keys = ("--api-key", "one", "--api-key", "two")
    with running_service(tiny_model_dir("llama"), *ENGINE, *SPLIT, *keys) as (_, url):
        asked = [asyncio.run(ask(url, prompt, key=key, **GREEDY)) for key in ("one", "two", "one", "two")]
        assert [cached for _, cached in asked] == [0, 0, 30 * BLOCK, 30 * BLOCK]
        assert len({tuple(made) for made, _ in asked}) == 1


def test_prefixes_are_shared_under_equal_cache_salts_only(service):
    prompt = tokens("salted", 30 * BLOCK + 1)
    for flags in (SPLIT, COLOCATED):
        url = service("llama", flags)
        asked = [asyncio.run(ask(url, prompt, **GREEDY, cache_salt=salt)) for salt in ("x", "y", "x", None)]
        assert [cached for _, cached in asked] == [0, 0, 30 * BLOCK, 0]
        assert len({tuple(made) for made, _ in asked}) == 1


def test_a_pinned_prefix_outlasts_unpinned_ones(split_tight):
    prompts = {name: tokens(name, 5 * BLOCK + 1) for name in ("kept", "for a while", "other")}
    keeping = {"kept": {"prompt_cache_retention": "24h"}, "for a while": {"prompt_cache_options": {"ttl": "30m"}}}
    _, url = split_tight
    for name, prompt in prompts.items():
        asyncio.run(ask(url, prompt, **GREEDY, **keeping.get(name, {})))
    evicted = metric(url, "prefix_cache_evictions_total")
    flood = [tokens(f"flood {number}", 25 * BLOCK) for number in range(12)]
    asyncio.run(ask_in_turn(url, flood, **GREEDY))
    assert metric(url, "prefix_cache_evictions_total") > evicted
    assert metric(url, 'kv_cache_blocks{instance="prefill-0",state="pinned"}') == 10
    found = {name: asyncio.run(ask(url, prompt, **GREEDY))[1] for name, prompt in prompts.items()}
    assert found == {"kept": 5 * BLOCK, "for a while": 5 * BLOCK, "other": 0}
    assert asyncio.run(all_blocks_free(url))


def test_lfu_keeps_the_frequent_prefix(tiny_model_dir):
    often, once = tokens("often", 5 * BLOCK + 1), tokens("once", 5 * BLOCK + 1)
    with running_service(tiny_model_dir("llama"), *TIGHT, *SPLIT, "--kv-eviction", "lfu") as (_, url):
        flood = [tokens(f"flood {number}", 25 * BLOCK) for number in range(6)]
        asyncio.run(ask_in_turn(url, [often, often, often, once, *flood], **GREEDY))
        assert [asyncio.run(ask(url, prompt, **GREEDY))[1] for prompt in (often, once)] == [5 * BLOCK, 0]


def test_no_reuse_without_prefix_caching(tiny_model_dir):
    with running_service(tiny_model_dir("llama"), *ENGINE, *SPLIT, "--no-enable-prefix-caching") as (_, url):
        prompt = tokens("off", 100)
        asked = [asyncio.run(ask(url, prompt, **GREEDY)) for _ in range(2)]
        assert [cached for _, cached in asked] == [0, 0]
        assert metric(url, "prefix_cache_queries_total") == 0


def test_a_restarted_worker_starts_with_an_empty_cache(tight):
    """The first prompt after a restart finds no cached prefix and gets the same tokens as before."""
    prompt = tokens("killed", 30 * BLOCK + 1)
    process, url = tight
    before = [asyncio.run(ask(url, prompt, **GREEDY)) for _ in range(2)]
    victims = named(process, r"(prefill|mixed)-\d")
    assert victims
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    after = [asyncio.run(ask(url, prompt, **GREEDY)) for _ in range(2)]
    assert [cached for _, cached in before] == [0, 30 * BLOCK]
    assert after[0][1] == 0
    assert len({tuple(made) for made, _ in before + after}) == 1
    assert "twofold:worker_restarts_total" in metrics(url)
