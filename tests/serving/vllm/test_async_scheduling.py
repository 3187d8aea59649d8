"""Asynchronous scheduling of vLLM workers: the same tokens, and no block is lost."""

import asyncio

import pytest

from serving.test_chaos import SOON
from serving.test_chaos import SPLIT as ROLES
from serving.test_chaos import check as check_faults
from serving.test_disconnects import check_disconnects
from serving.vllm.conftest import ENGINE
from serving.vllm.test_handoffs import SPLIT, WAYS, check, prompts
from serving.vllm.test_speculation import outputs, plain  # noqa: F401  (a fixture)
from support.api_client import all_blocks_free, block_counts, complete_all
from support.running_service import running_service
from support.vllm_alone import greedy_by_vllm
from support.vllm_async import schedule_asynchronously, tokens_in_flight
from twofold.bench.services import served

ASYNC = ("--engine-args", '{"async_scheduling": true}')


@pytest.fixture(autouse=True)
def plugin(tmp_path, monkeypatch):
    schedule_asynchronously(tmp_path, monkeypatch)


@pytest.mark.covers(engine="vllm", model="llama", feature="async")
@pytest.mark.parametrize("flags", [(*SPLIT, *WAYS["layer-wise"]), (*SPLIT, *WAYS["pull"]), ("--colocated", "1")])
def test_tokens_equal_those_of_synchronous_scheduling(flags, plain, vllm_model_dir, tmp_path):  # noqa: F811
    """Greedy, seeded, penalized and constrained tokens. vLLM schedules a decode before it has the previous token."""
    with served(vllm_model_dir("llama"), (*ENGINE, *ASYNC, *flags)) as url:
        assert outputs(url) == plain
        if "--decode" in flags:
            check(url, "llama", vllm_model_dir("llama"))
    assert max(tokens_in_flight(tmp_path)) == 2


@pytest.mark.parametrize("way", ["layer-wise", "pull"])
def test_clients_may_leave_and_workers_may_fail(way, vllm_model_dir):
    """After disconnects at any moment all blocks are free; streams are unchanged if a worker fails."""
    given = (*ENGINE, *SOON, *ASYNC, *SPLIT, *WAYS[way])
    with running_service(vllm_model_dir("llama"), *given) as (process, url):
        before = block_counts(url)
        check_disconnects(url, 60)
        assert block_counts(url) == before
        check_faults(process, url, ROLES, rounds=2 * len(ROLES))  # killed, then stopped
        assert block_counts(url) == before


def test_preempted_decodes_continue(vllm_service, vllm_model_dir):
    """Outputs do not change when vLLM preempts decodes that have a token in flight."""
    some = [prompt[:300] for prompt in prompts() if len(prompt) >= 200] * 4
    long = greedy_by_vllm(vllm_model_dir("llama"), some, 200)
    small = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "6MiB")
    url = vllm_service("llama", *SPLIT, *ASYNC, *WAYS["layer-wise"], *small)
    made = asyncio.run(complete_all(url, some, at_once=len(some), max_tokens=200, temperature=0, ignore_eos=True))
    assert made == long
    assert asyncio.run(all_blocks_free(url))
