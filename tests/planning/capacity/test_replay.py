"""Trace replay with the cache code of live services, compared with Mooncake's published hit rates."""

import pytest

from support.traces import ask, public_trace
from twofold.planning.capacity.replay import trace_reuse
from twofold.workload.trace import open_trace

# Percent of all blocks, by capacity in blocks.
LRU = {
    1_000: "4.45",
    3_000: "6.50",
    5_000: "11.04",
    10_000: "21.12",
    30_000: "32.57",
    50_000: "35.46",
    100_000: "36.37",
}
LFU = {10_000: "13.15", 30_000: "27.55", 50_000: "34.38"}


@pytest.mark.parametrize(("name", "figures"), [("lru", LRU), ("lfu", LFU)])
def test_the_conversation_trace_hits_as_published(name, figures):
    found = trace_reuse(open_trace(public_trace("mooncake-conversation.jsonl")), tuple(figures), (name,))
    assert (found.requests, found.blocks, found.distinct_blocks) == (12_031, 288_500, 182_790)
    assert f"{100 * found.highest:.2f}" == "36.64"
    assert {cache.capacity: f"{100 * cache.rate:.2f}" for cache in found.caches} == figures


def test_each_policy_and_capacity_has_its_own_cache():
    requests = [ask(0, 0.0, prefix_blocks=(0, 1)), ask(1, 1.0, prefix_blocks=(0, 2)), ask(2, 2.0, prefix_blocks=(0, 1))]
    found = trace_reuse(requests, (2, 100), ("lru", "lfu"))
    assert (found.blocks, found.distinct_blocks, found.highest) == (6, 3, 0.5)
    hits = {(cache.eviction, cache.capacity): (cache.hits, cache.evicted) for cache in found.caches}
    assert hits == {("lru", 2): (2, 2), ("lru", 100): (3, 0), ("lfu", 2): (2, 2), ("lfu", 100): (3, 0)}


def test_a_trace_without_prefix_blocks_hits_nothing():
    found = trace_reuse([ask(0)], (10,), ("lru",))
    assert (found.highest, found.caches[0].rate) == (None, 0.0)
