"""Planning of workers and their memory from flags."""

import pytest

from twofold.engine.base import KvLayout, LayerShape
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.serving.config import AUTO
from twofold.serving.launch.memory_plan import plan_memory
from twofold.serving.launch.worker_plan import BatchPolicies, plan_workers

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 8),) * 4, block_size=16, dtype="float32", itemsize=4)


def plan(policies=BatchPolicies(), **changes):  # noqa: B008  (it is frozen)
    return plan_workers(policies, **{"prefill": 1, "decode": 1, "colocated": 0, "pin_cores": True} | changes)


def test_roles_determine_batchers():
    assert [(w.instance, w.role, w.batcher) for w in plan(decode=2)] == [
        ("prefill-0", Role.PREFILL, "prefill"),
        ("decode-0", Role.DECODE, "decode"),
        ("decode-1", Role.DECODE, "decode"),
    ]
    assert {w.batcher for w in plan(prefill=0, decode=0, colocated=2)} == {"chunked-prefill"}
    whole = BatchPolicies(chunked_prefill=False)
    assert {w.batcher for w in plan(whole, prefill=0, decode=0, colocated=2)} == {"mixed"}


def test_cores_overlap_only_when_workers_outnumber_them(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert [w.cores for w in plan()] == [(0, 1), (2, 3)]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert [w.cores for w in plan(decode=2)] == [(0,), (1,), (1,)]
    assert [w.cores for w in plan(pin_cores=False)] == [(), ()]


def test_memory_is_divided_into_whole_blocks():
    per_block = 4 * 2 * 16 * 16 * 4
    made = plan_memory(LAYOUT, kv_cache_bytes=10 * per_block + 5, max_model_len=100, workers=2, available_bytes=10**9)
    assert (LAYOUT.bytes_per_block, made.num_blocks) == (per_block, 10)


def test_rejects_too_little_memory_with_the_required_size():
    with pytest.raises(ConfigurationError, match="at least 1MiB or lower --max-model-len"):
        plan_memory(LAYOUT, kv_cache_bytes=10**5, max_model_len=1000, workers=1, available_bytes=10**9)
    with pytest.raises(ConfigurationError, match="this machine has"):
        plan_memory(LAYOUT, kv_cache_bytes=10**8, max_model_len=1000, workers=11, available_bytes=10**9)


def test_a_measured_budget_needs_whole_prompt_batchers():
    workers = plan(BatchPolicies(max_num_batched_tokens=AUTO))
    assert [(w.batcher, w.max_num_batched_tokens, w.measures_budget) for w in workers] == [
        ("prefill", 2048, True),
        ("decode", 2048, False),
    ]
    whole = BatchPolicies(max_num_batched_tokens=AUTO, chunked_prefill=False)
    (alone,) = plan(whole, prefill=0, decode=0, colocated=1)
    assert alone.measures_budget
    for flags, counts in (({}, {"prefill": 0, "decode": 0, "colocated": 1}), ({"roles_move": True}, {})):
        with pytest.raises(ConfigurationError, match="auto needs batchers for whole prompts"):
            plan(BatchPolicies(max_num_batched_tokens=AUTO, **flags), **counts)
