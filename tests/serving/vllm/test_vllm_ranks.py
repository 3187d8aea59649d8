"""vLLM workers of several ranks: outputs equal those of one vLLM engine across degrees of parallelism.

All-reduces add float32 numbers in another order, so logits differ in their last bits. Tokens are equal because these
random models have no two tokens that close at any step.
"""

import asyncio
import re

import pytest

from serving.test_chaos import SOON
from serving.test_chaos import check as check_faults
from serving.test_disconnects import check_disconnects
from serving.vllm.conftest import ENGINE
from serving.vllm.test_handoffs import OUTPUT, check, prompts
from support.api_client import all_blocks_free, block_counts, complete_all
from support.running_service import running_service
from support.vllm_alone import greedy_by_vllm
from twofold.bench.services import served
from twofold.errors import ConfigurationError

SPLIT = (*ENGINE, *SOON, "--prefill", "1", "--decode", "1")
SAMPLED = {"max_tokens": OUTPUT, "temperature": 0.9, "top_p": 0.95, "seed": 4, "ignore_eos": True}
EXPERTS = ("--engine-args", '{"enable_expert_parallel": true}')
WAYS = {  # flags, and the killed rank of each worker: first of the one that has the running requests
    "TP2 to TP1": (("--prefill-tp", "2"), ("decode-0", "prefill-0.1")),
    "TP1 to TP2": (("--decode-tp", "2", "--handoff", "pull"), ("decode-0.1", "prefill-0")),
    "PP2 to TP1": (("--prefill-pp", "2"), ("decode-0", "prefill-0.1")),
}


@pytest.fixture(scope="module")
def sampled(vllm_model_dir):
    """Return the sampled outputs of one colocated vLLM worker of one process."""
    with served(vllm_model_dir("llama"), (*ENGINE, "--colocated", "1")) as url:
        return asyncio.run(complete_all(url, prompts(), at_once=20, **SAMPLED))


@pytest.mark.covers(engine="vllm", model="llama", feature=("handoff", "tp", "pp", "replay"))
@pytest.mark.parametrize("way", WAYS)
def test_split_workers_equal_one_vllm(way, vllm_model_dir, sampled):
    """Greedy, sampled and interrupted streams do not depend on the parallelism, and every block is freed, also after a
    rank of each worker was killed.
    """
    flags, killed = WAYS[way]
    with running_service(vllm_model_dir("llama"), *SPLIT, *flags) as (process, url):
        before = block_counts(url)
        check(url, "llama", vllm_model_dir("llama"))
        assert asyncio.run(complete_all(url, prompts(), at_once=20, **SAMPLED)) == sampled
        check_disconnects(url, 60)
        check_faults(process, url, killed, rounds=len(killed))
        assert block_counts(url) == before


@pytest.mark.covers(engine="vllm", model="qwen3", feature=("tp", "pp", "replay"))
def test_a_stopped_rank_restarts_its_worker(vllm_model_dir):
    """Stages hand off to tensor shards, and streams survive a rank that hangs."""
    flags = ("--prefill-pp", "2", "--decode-tp", "2", "--handoff", "serialized")
    with running_service(vllm_model_dir("qwen3"), *SPLIT, *flags) as (process, url):
        check(url, "qwen3", vllm_model_dir("qwen3"))
        check_faults(process, url, ("decode-0.1",), rounds=2)  # killed, then stopped


@pytest.mark.covers(engine="vllm", model="mixtral", feature=("tokens", "handoff", "tp", "experts", "replay"))
@pytest.mark.parametrize("flags", [("--prefill-tp", "2", *EXPERTS), ("--tp", "2", "--handoff", "pull", *EXPERTS)])
def test_ranks_may_divide_the_experts(flags, vllm_model_dir):
    """Each rank has half of the experts, in one phase or in both. Streams survive a rank of each worker."""
    killed = ("decode-0", "prefill-0.1")
    with running_service(vllm_model_dir("mixtral"), *SPLIT, *flags) as (process, url):
        before = block_counts(url)
        check(url, "mixtral", vllm_model_dir("mixtral"))
        check_faults(process, url, killed, rounds=len(killed))
        assert block_counts(url) == before


def test_colocated_shards_equal_one_vllm(vllm_model_dir):
    """Workers of both phases with two stages of two shards generate what one vLLM engine generates."""
    with served(vllm_model_dir("llama"), (*ENGINE, "--colocated", "1", "--tp", "2", "--pp", "2")) as url:
        how = {"max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        made = asyncio.run(complete_all(url, prompts(), at_once=20, **how))
        assert made == greedy_by_vllm(vllm_model_dir("llama"), prompts(), OUTPUT)
        assert asyncio.run(all_blocks_free(url))


@pytest.mark.refuses(engine="vllm", transport="nixl", feature="tp")
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--tp", "4"), "2 key-value heads, which 4 tensor ranks"),
        (("--pp", "4"), "3 layers, too few for the 4 pipeline stages"),
        (("--tp", "2", "--transport", "nixl"), "--transport nixl moves whole blocks"),
        (("--tp", "2", "--kv-checksums"), "--kv-checksums needs whole blocks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_refuses_impossible_splits(flags, reason, vllm_model_dir):
    with (
        pytest.raises(ConfigurationError, match=re.escape(reason)),
        served(vllm_model_dir("llama"), (*ENGINE, "--prefill", "1", "--decode", "1", *flags)),
    ):
        pass
