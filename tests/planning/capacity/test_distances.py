"""For each block of a prompt, the smallest LRU cache capacity at which the block is a hit."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.traces import public_trace
from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.tiers import TieredCache
from twofold.planning.capacity.curve import NEVER, least_capacities, stack_distances
from twofold.workload.trace import open_trace


def branches(draws):
    """Return prompts with shared prefixes, as lists of block ids."""
    ids = {}
    return [[ids.setdefault(tuple(path[:depth]), len(ids)) for depth in range(1, len(path) + 1)] for path in draws]


LONGEST, LARGEST = 8, 40  # most blocks of a prompt and of a cache; each cache has room for any prompt
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=LONGEST), min_size=1, max_size=40).map(branches)


def simulated_hits(prompts, cache):
    """Replay prompts in a cache; return the number of block hits of each prompt."""
    hits = []
    for prompt in prompts:
        count = cache.match(prompt)
        cache.touch(prompt, count)
        cache.insert(prompt, start=count)
        hits.append(count)
    return hits


def counted_hits(prompts, capacity):
    """Return the number of hits of each prompt in a cache of `capacity` blocks."""
    least = least_capacities(prompts)
    ends = np.cumsum([len(prompt) for prompt in prompts])
    return [int((part <= capacity).sum()) for part in np.split(least, ends[:-1])]


@given(st.lists(st.integers(0, 8), max_size=60))
def test_distance_counts_distinct_keys_since_the_last_use(keys):
    expected = []
    for place, key in enumerate(keys):
        before = [other for other in range(place) if keys[other] == key]
        expected.append(len(set(keys[before[-1] : place])) if before else NEVER)
    assert stack_distances(keys).tolist() == expected


@given(PROMPTS)
def test_hits_equal_those_of_the_live_cache(prompts):
    for capacity in range(LONGEST, LARGEST, 3):
        cache = PrefixCache(capacity, create_eviction("lru"))
        assert counted_hits(prompts, capacity) == simulated_hits(prompts, cache)


@given(PROMPTS, st.integers(LONGEST, 16), st.integers(1, 12))
def test_tiers_split_the_lru_stack(prompts, first, second):
    cache = TieredCache([PrefixCache(size, create_eviction("lru")) for size in (first, second)])
    for prompt, in_first, in_both in zip(
        prompts, counted_hits(prompts, first), counted_hits(prompts, first + second), strict=True
    ):
        found = cache.match(prompt)
        assert sum(found) == in_both
        # The first tier may also hold blocks that follow a block of the second tier.
        assert found[0] >= in_first
        cache.touch(prompt, in_both)
        cache.insert(prompt, start=in_both)


@given(PROMPTS)
def test_least_capacities_do_not_fall_within_a_prompt(prompts):
    least = least_capacities(prompts)
    start = 0
    for prompt in prompts:
        part = least[start : start + len(prompt)].tolist()
        # A block hits only if all blocks before it in the prompt hit.
        assert part == sorted(part)
        start += len(prompt)
    assert start == len(least)


def test_accepts_hash_keys():
    prompts = [[b"a", b"b"], [b"a", b"c"], [b"a", b"b"]]
    assert least_capacities(prompts).tolist() == [NEVER, NEVER, 2, NEVER, 2, 3]


def test_empty_prompts_have_no_distances():
    assert len(least_capacities([])) == 0
    assert len(least_capacities([[], []])) == 0


def test_reproduces_mooncakes_published_hit_rates():
    prompts = [request.prefix_blocks for request in open_trace(public_trace("mooncake-conversation.jsonl"))]
    least = least_capacities(prompts)
    assert len(least) == len(list(chain.from_iterable(prompts))) == 288_500
    published = {1_000: 4.45, 3_000: 6.50, 5_000: 11.04, 10_000: 21.12, 30_000: 32.57, 50_000: 35.46, 100_000: 36.37}
    for capacity, expected in published.items():
        assert round(100 * float((least <= capacity).mean()), 2) == pytest.approx(expected)
    assert round(100 * float((least < NEVER).mean()), 2) == pytest.approx(36.64)


@pytest.mark.parametrize("capacity", [1_000, 10_000, 50_000])
def test_conversation_trace_hits_equal_those_of_the_live_cache(capacity):
    prompts = [request.prefix_blocks for request in open_trace(public_trace("mooncake-conversation.jsonl"))]
    cache = PrefixCache(capacity, create_eviction("lru"))
    simulated_hits(prompts, cache)
    assert cache.hits == int((least_capacities(prompts) <= capacity).sum())
