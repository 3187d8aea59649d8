"""Speculative decoding of vLLM workers: drafts change no token, survive faults, and leave no block behind."""

import asyncio
import json
import random

import pytest

from serving.test_chaos import SOON, check
from serving.test_chaos import SPLIT as ROLES
from serving.test_disconnects import check_disconnects
from serving.vllm.conftest import ENGINE
from support.api_client import all_blocks_free, block_counts, complete_all
from support.chaos import PENALIZED, WORDS
from support.running_service import running_service
from support.tiny_models import write_eagle_head
from support.vllm_alone import greedy_by_vllm
from support.vllm_drafts import count_drafts, draft_counts
from twofold.bench.services import served

SPLIT, COLOCATED = ("--prefill", "1", "--decode", "1"), ("--colocated", "1")
WAYS = {
    "layer-wise": ("--handoff", "layer-wise", "--kv-checksums"),
    "pull": ("--transport", "nixl", "--handoff", "pull", "--kv-checksums"),
}
OUTPUT = 40
SAMPLINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 4},
    "penalized": {"temperature": 0, **PENALIZED},
    "constrained": {"temperature": 0.9, "seed": 5, **WORDS},
}
METHODS = ("draft_model", "ngram", "eagle")


@pytest.fixture(scope="module")
def drafting(vllm_model_dir, tmp_path_factory):
    """Return flags by method: drafts by n-grams, an EAGLE head, or the model itself, which predicts greedy tokens."""
    model = vllm_model_dir("llama")
    by = {
        "draft_model": {"model": str(model)},
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "eagle": {"model": str(write_eagle_head(model, tmp_path_factory.mktemp("eagle")))},
    }
    chosen = {method: {"method": method, "num_speculative_tokens": 3, **own} for method, own in by.items()}
    return {method: ("--engine-args", json.dumps({"speculative_config": each})) for method, each in chosen.items()}


def prompts():
    draw = random.Random(3)
    return [[draw.randint(10, 500) for _ in range(length)] for length in (1, 2, 31, 32, 33, 64, 200, 500)]


def outputs(url):
    """Return the outputs by kind of sampling; check that all blocks are free afterwards."""
    before = block_counts(url)
    common = {"max_tokens": OUTPUT, "ignore_eos": True, "at_once": 1}
    made = {name: asyncio.run(complete_all(url, prompts(), **common, **how)) for name, how in SAMPLINGS.items()}
    assert asyncio.run(all_blocks_free(url))
    assert block_counts(url) == before
    return made


@pytest.fixture(scope="module")
def plain(vllm_model_dir):
    """Return the outputs without drafts: of plain vLLM if greedy, otherwise of a colocated worker."""
    model = vllm_model_dir("llama")
    with served(model, (*ENGINE, *COLOCATED)) as url:
        made = outputs(url)
    assert made["greedy"] == greedy_by_vllm(model, prompts(), OUTPUT)
    assert made["penalized"] == greedy_by_vllm(model, prompts(), OUTPUT, **PENALIZED)
    return made


@pytest.mark.covers(engine="vllm", model="llama", feature="speculation")
@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_token_and_are_accepted_as_often_split_as_colocated(
    method, plain, drafting, vllm_model_dir, tmp_path, monkeypatch
):
    """For greedy, seeded, penalized and constrained outputs. A lost draft shows as rejected, lost KV in the sum
    of the drafted tokens."""
    model = vllm_model_dir("llama")
    counts = {}
    for name, flags in {"colocated": COLOCATED, **{way: (*SPLIT, *given) for way, given in WAYS.items()}}.items():
        count_drafts(tmp_path / name, monkeypatch)
        with served(model, (*ENGINE, *drafting[method], *flags)) as url:
            assert outputs(url) == plain, name
        counts[name] = draft_counts(tmp_path / name)
    drafted, accepted, _ = counts["colocated"]
    assert drafted >= accepted > (300 if method == "draft_model" else 10)
    assert counts == dict.fromkeys(counts, counts["colocated"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_clients_may_leave_and_workers_may_fail(method, way, drafting, vllm_model_dir):
    """After disconnects at any moment all blocks are free; streams are unchanged if a worker fails."""
    model = vllm_model_dir("llama")
    given = (*ENGINE, *SOON, *SPLIT, *drafting[method], *WAYS[way])
    with running_service(model, *given) as (process, url):
        before = block_counts(url)
        check_disconnects(url, 60)
        assert block_counts(url) == before
        check(process, url, ROLES)
        assert block_counts(url) == before
