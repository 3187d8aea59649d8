"""One pass over a trace says what an LRU cache of every size would hit: the very hits of a cache that is simulated."""

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
    """Prompts as a tree makes them: a block id stands for the block and all before it."""
    ids = {}
    return [
        [ids.setdefault(tuple(path[:depth]), len(ids)) for depth in range(1, len(path) + 1)] for path in draws
    ]


LONGEST, LARGEST = 8, 40  # blocks of a prompt; of a cache, which has room for a prompt at least
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=LONGEST), min_size=1, max_size=40).map(branches)


def simulated_hits(prompts, cache):
    """The blocks that each request finds at its arrival, which it then uses; it stores the rest."""
    hits = []
    for prompt in prompts:
        count = cache.match(prompt)
        cache.touch(prompt, count)
        cache.insert(prompt, start=count)
        hits.append(count)
    return hits


def counted_hits(prompts, capacity):
    """The same by the least capacities of their blocks."""
    least = least_capacities(prompts)
    ends = np.cumsum([len(prompt) for prompt in prompts])
    return [int((part <= capacity).sum()) for part in np.split(least, ends[:-1])]


@given(st.lists(st.integers(0, 8), max_size=60))
def test_a_distance_counts_what_was_used_since(keys):
    """The number of different keys since the last use, itself included, by looking at all of them."""
    expected = []
    for place, key in enumerate(keys):
        before = [other for other in range(place) if keys[other] == key]
        expected.append(len(set(keys[before[-1] : place])) if before else NEVER)
    assert stack_distances(keys).tolist() == expected


@given(PROMPTS)
def test_every_request_hits_what_the_cache_has(prompts):
    """At every capacity, request by request, with the cache that serves live."""
    for capacity in range(LONGEST, LARGEST, 3):
        cache = PrefixCache(capacity, create_eviction("lru"))
        assert counted_hits(prompts, capacity) == simulated_hits(prompts, cache)


@given(PROMPTS, st.integers(LONGEST, 16), st.integers(1, 12))
def test_tiers_are_parts_of_the_same_stack(prompts, first, second):
    """A hit at a distance up to the first tier's capacity is in it, one up to the sum of both in the second."""
    cache = TieredCache([PrefixCache(size, create_eviction("lru")) for size in (first, second)])
    for prompt, in_first, in_both in zip(
        prompts, counted_hits(prompts, first), counted_hits(prompts, first + second), strict=True
    ):
        found = cache.match(prompt)
        assert sum(found) == in_both
        # The first tier may have blocks behind one that only the second has; what can be loaded from it is then more.
        assert found[0] >= in_first
        cache.touch(prompt, in_both)
        cache.insert(prompt, start=in_both)


@given(PROMPTS)
def test_least_capacities_do_not_fall_within_a_prompt(prompts):
    """A block is found only where all before it are."""
    least = least_capacities(prompts)
    start = 0
    for prompt in prompts:
        part = least[start : start + len(prompt)].tolist()
        assert part == sorted(part)
        start += len(prompt)
    assert start == len(least)


def test_keys_may_be_hashes():
    """As those of a live service are."""
    prompts = [[b"a", b"b"], [b"a", b"c"], [b"a", b"b"]]
    assert least_capacities(prompts).tolist() == [NEVER, NEVER, 2, NEVER, 2, 3]


def test_nothing_has_no_distance():
    """No prompts, and prompts without whole blocks."""
    assert len(least_capacities([])) == 0
    assert len(least_capacities([[], []])) == 0


def test_the_published_hit_rates_come_from_one_pass():
    """The conversation trace of Mooncake: the LRU hit rates of seven capacities, to the printed digits."""
    prompts = [request.prefix_blocks for request in open_trace(public_trace("mooncake-conversation.jsonl"))]
    least = least_capacities(prompts)
    assert len(least) == len(list(chain.from_iterable(prompts))) == 288_500
    published = {
        1_000: 4.45,
        3_000: 6.50,
        5_000: 11.04,
        10_000: 21.12,
        30_000: 32.57,
        50_000: 35.46,
        100_000: 36.37,
    }
    for capacity, expected in published.items():
        assert round(100 * float((least <= capacity).mean()), 2) == pytest.approx(expected)
    assert round(100 * float((least < NEVER).mean()), 2) == pytest.approx(36.64)


@pytest.mark.parametrize("capacity", [1_000, 10_000, 50_000])
def test_the_trace_hits_as_the_cache_does(capacity):
    """All of the conversation trace through the cache that serves live."""
    prompts = [request.prefix_blocks for request in open_trace(public_trace("mooncake-conversation.jsonl"))]
    cache = PrefixCache(capacity, create_eviction("lru"))
    simulated_hits(prompts, cache)
    assert cache.hits == int((least_capacities(prompts) <= capacity).sum())
