"""Two vLLMs and a hand-off say what one says: token for token, in float32, and every block comes back."""

import asyncio
import random
import re
from functools import cache

import pytest

from serving.test_disconnects import check_disconnects
from support.api_client import all_blocks_free, block_counts, complete_all
from support.vllm_alone import greedy_by_vllm
from twofold.bench.services import metrics

SPLIT = ("--prefill", "1", "--decode", "1")
OVER_NIXL = ("--transport", "nixl")
WAYS = {
    "layer-wise": (*OVER_NIXL, "--handoff", "layer-wise", "--kv-checksums"),
    "serialized": (*OVER_NIXL, "--handoff", "serialized"),
    "pull": (*OVER_NIXL, "--handoff", "pull", "--kv-checksums"),
    "by size": (*OVER_NIXL, "--handoff", "by-size"),
    "auto": (*OVER_NIXL, "--handoff", "auto"),
    "layer-wise, shared memory": ("--handoff", "layer-wise", "--kv-checksums"),
}
OUTPUT, LONGEST = 12, 1500


@cache
def prompts():
    """Of the lengths where blocks of 32 end, and of every order of magnitude."""
    draw = random.Random(3)
    lengths = [1, 2, 31, 32, 33, 64, LONGEST] + [round(LONGEST ** draw.random()) for _ in range(33)]
    return [[draw.randint(10, 500) for _ in range(length)] for length in lengths]


@cache
def expected(arch, directory):
    return greedy_by_vllm(directory, prompts(), OUTPUT)


def handed_off(url):
    return float(re.search(r"^twofold:kv_transfer_seconds_count (\S+)$", metrics(url), re.MULTILINE)[1])


def check(url, arch, directory):
    """Alone, and all at once; both sides of the hand-off end with as many free blocks as they began with."""
    before = block_counts(url)
    for how in ({"at_once": 1}, {"at_once": 40, "spread_s": 1.0}):
        made = asyncio.run(
            complete_all(url, prompts(), **how, max_tokens=OUTPUT, temperature=0, ignore_eos=True)
        )
        wrong = [i for i in range(len(made)) if made[i] != expected(arch, directory)[i]]
        assert not wrong, f"{how}: prompts {wrong} differ"
    assert asyncio.run(all_blocks_free(url))
    assert block_counts(url) == before
    assert handed_off(url) >= 2 * len(prompts())


@pytest.mark.parametrize("way", WAYS)
def test_llama_split_says_what_one_vllm_says(way, vllm_service, vllm_model_dir):
    """Every way for KV to travel."""
    check(vllm_service("llama", *SPLIT, *WAYS[way]), "llama", vllm_model_dir("llama"))


def test_qwen3_split_says_what_one_vllm_says(vllm_service, vllm_model_dir):
    """Another architecture, layer-wise over NIXL."""
    check(vllm_service("qwen3", *SPLIT, *WAYS["layer-wise"]), "qwen3", vllm_model_dir("qwen3"))


def test_sampled_output_is_that_of_one_worker(vllm_service):
    """Keyed by seed and position, whichever worker draws it."""
    how = {"max_tokens": OUTPUT, "temperature": 0.9, "top_p": 0.95, "seed": 4, "ignore_eos": True}
    made = [
        asyncio.run(complete_all(vllm_service("llama", *flags), prompts(), at_once=20, **how))
        for flags in (SPLIT, ("--colocated", "1"))
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("way", ["layer-wise", "pull"])
def test_clients_that_leave_give_every_block_back(way, vllm_service):
    """In the queue, in prefill, in the hand-off and in decode; by vLLM's own account."""
    check_disconnects(vllm_service("llama", *SPLIT, *WAYS[way]), 60)


def test_decodes_that_are_preempted_go_on(vllm_service, vllm_model_dir):
    """Memory for a few of them at a time: vLLM computes what it gave up once more, prompt and all."""
    some = [prompt[:300] for prompt in prompts() if len(prompt) >= 200] * 4
    assert len(some) >= 12
    long = greedy_by_vllm(vllm_model_dir("llama"), some, 200)
    flags = (*SPLIT, *WAYS["layer-wise"], "--max-model-len", "1024", "--kv-cache-memory-bytes", "6MiB")
    url = vllm_service("llama", *flags)
    made = asyncio.run(
        complete_all(url, some, at_once=len(some), max_tokens=200, temperature=0, ignore_eos=True)
    )
    assert made == long
    assert asyncio.run(all_blocks_free(url))
