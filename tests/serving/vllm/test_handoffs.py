"""Hand-offs between two vLLM workers: output equals that of one vLLM engine in float32, and every block is freed."""

import asyncio
import random
import re
from functools import cache

import pytest

from serving.test_disconnects import check_disconnects
from support.api_client import all_blocks_free, block_counts, complete_all
from support.chaos import PENALIZED
from support.vllm_alone import greedy_by_vllm
from twofold.bench.services import metrics

SPLIT = ("--prefill", "1", "--decode", "1")
OVER_NIXL = ("--transport", "nixl")
WAYS = {
    "layer-wise": (*OVER_NIXL, "--handoff", "layer-wise", "--kv-checksums"),
    "serialized": (*OVER_NIXL, "--handoff", "serialized"),
    "pull": (*OVER_NIXL, "--handoff", "pull", "--kv-checksums"),
    "by-size": (*OVER_NIXL, "--handoff", "by-size"),
    "auto": (*OVER_NIXL, "--handoff", "auto"),
    "layer-wise-shared-memory": ("--handoff", "layer-wise", "--kv-checksums"),
}
OUTPUT, LONGEST = 12, 1500


@cache
def prompts():
    """Return 40 prompts of 1 to 1,500 tokens, including lengths around multiples of the block size 32."""
    draw = random.Random(3)
    lengths = [1, 2, 31, 32, 33, 64, LONGEST] + [round(LONGEST ** draw.random()) for _ in range(33)]
    return [[draw.randint(10, 500) for _ in range(length)] for length in lengths]


@cache
def expected(arch, directory):
    return greedy_by_vllm(directory, prompts(), OUTPUT)


def handed_off(url):
    return float(re.search(r"^twofold:kv_transfer_seconds_count (\S+)$", metrics(url), re.MULTILINE)[1])


def check(url, arch, directory):
    """Send prompts sequentially and concurrently; check the outputs, and that all blocks are free afterwards."""
    before = block_counts(url)
    for how in ({"at_once": 1}, {"at_once": 40, "spread_s": 1.0}):
        made = asyncio.run(complete_all(url, prompts(), **how, max_tokens=OUTPUT, temperature=0, ignore_eos=True))
        wrong = [i for i in range(len(made)) if made[i] != expected(arch, directory)[i]]
        assert not wrong, f"{how}: outputs of prompts {wrong} differ"
    assert asyncio.run(all_blocks_free(url))
    assert block_counts(url) == before
    assert handed_off(url) >= 2 * len(prompts())


@pytest.mark.covers(engine="vllm", model="llama", transport=("shared_memory", "nixl"), feature="handoff")
@pytest.mark.covers(engine="vllm", model="llama", feature="tokens")
@pytest.mark.covers(engine="vllm", feature=("layer-wise", "serialized", "pull", "checksums"))
@pytest.mark.parametrize("way", WAYS)
def test_split_llama_equals_one_vllm(way, vllm_service, vllm_model_dir):
    """In every hand-off mode and over both transports, the output equals that of one vLLM engine."""
    check(vllm_service("llama", *SPLIT, *WAYS[way]), "llama", vllm_model_dir("llama"))


@pytest.mark.covers(engine="vllm", model="qwen3", transport="nixl", feature=("tokens", "handoff"))
def test_split_qwen3_equals_one_vllm(vllm_service, vllm_model_dir):
    """With layer-wise hand-offs over NIXL, the output equals that of one vLLM engine."""
    check(vllm_service("qwen3", *SPLIT, *WAYS["layer-wise"]), "qwen3", vllm_model_dir("qwen3"))


@pytest.mark.covers(engine="vllm", model="llama", feature="penalties")
def test_penalties_equal_those_of_one_vllm(vllm_service, vllm_model_dir):
    """Penalties and biases give vLLM's own output, although the decode worker gets the first token from its peer."""
    adjusted = {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.4,
        "logit_bias": {17: 2.0, 18: -3.0},
    }
    some = prompts()[:20]
    alone = greedy_by_vllm(vllm_model_dir("llama"), some, OUTPUT, **adjusted)
    how = {"max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, **adjusted}
    assert asyncio.run(complete_all(vllm_service("llama", *SPLIT), some, at_once=10, **how)) == alone
    assert alone != expected("llama", vllm_model_dir("llama"))[:20], "the penalties must matter"


@pytest.mark.covers(engine="vllm", model="llama", feature=("sampling", "colocated"))
@pytest.mark.parametrize("adjusted", [{}, PENALIZED], ids=["plain", "penalized"])
def test_sampled_output_is_independent_of_the_split(adjusted, vllm_service):
    """Split and colocated workers generate equal sampled outputs."""
    how = {"max_tokens": OUTPUT, "temperature": 0.9, "top_p": 0.95, "seed": 4, "ignore_eos": True, **adjusted}
    made = [
        asyncio.run(complete_all(vllm_service("llama", *flags), prompts(), at_once=20, **how))
        for flags in (SPLIT, ("--colocated", "1"))
    ]
    assert made[0] == made[1]


@pytest.mark.covers(engine="vllm", feature="disconnects")
@pytest.mark.parametrize("way", ["layer-wise", "pull"])
def test_disconnected_clients_free_every_block(way, vllm_service):
    """After clients disconnect, all KV blocks of the aborted requests become free."""
    check_disconnects(vllm_service("llama", *SPLIT, *WAYS[way]), 60)


@pytest.mark.covers(engine="vllm", model="llama", feature="preemption")
def test_preempted_decodes_continue(vllm_service, vllm_model_dir):
    """Outputs do not change when vLLM preempts decodes for lack of memory."""
    some = [prompt[:300] for prompt in prompts() if len(prompt) >= 200] * 4
    assert len(some) >= 12
    long = greedy_by_vllm(vllm_model_dir("llama"), some, 200)
    flags = (*SPLIT, *WAYS["layer-wise"], "--max-model-len", "1024", "--kv-cache-memory-bytes", "6MiB")
    url = vllm_service("llama", *flags)
    made = asyncio.run(complete_all(url, some, at_once=len(some), max_tokens=200, temperature=0, ignore_eos=True))
    assert made == long
    assert asyncio.run(all_blocks_free(url))
