"""A prefix cache of several tiers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import caches
from twofold.kvcache.cache import PrefixCache, RemovalReason
from twofold.kvcache.eviction import EVICTIONS, create_eviction
from twofold.kvcache.eviction.lru import Lru
from twofold.kvcache.tiers import TieredCache

prompts = caches.prompts(alphabet=3, longest=8)


def ask(cache, keys):
    """Look up and insert a prompt; return the evicted blocks and the number of hits."""
    found = cache.match(keys)
    count = found if isinstance(found, int) else sum(found)
    gone = cache.touch(keys, count) or []
    return gone + cache.insert(keys, count), count


@settings(max_examples=300)
@given(st.lists(prompts, max_size=40), st.integers(8, 10), st.integers(1, 6))
def test_lru_tiers_behave_like_one_lru_cache(prompts, upper, lower):
    # Each prompt fits in the first tier.
    one = PrefixCache(upper + lower, Lru())
    tiers = TieredCache([PrefixCache(upper, Lru()), PrefixCache(lower, Lru())])
    for keys in prompts:
        assert ask(tiers, keys) == ask(one, keys)
        assert sum(map(len, tiers.tiers)) == len(one)
    assert sum(tier.hits for tier in tiers.tiers) == one.hits
    assert tiers.tiers[0].misses == one.misses


@pytest.mark.parametrize("name", EVICTIONS)
@given(prompts=st.lists(st.tuples(prompts, st.booleans()), max_size=40))
def test_each_block_is_in_one_tier_within_capacity(name, prompts):
    cache = TieredCache([PrefixCache(capacity, create_eviction(name)) for capacity in (2, 3, 4)])
    known, held = set(), []
    for keys, holds in prompts:
        known.update(keys)
        ask(cache, keys)
        if holds and keys[0] in cache:
            cache.hold(keys[0])
            held.append(keys[0])
        elif held:
            cache.release(held.pop())
        for key in known:
            assert sum(key in tier for tier in cache.tiers) <= 1
        assert all(len(tier) <= tier.capacity for tier in cache.tiers)
        assert all(key in cache for key in held)
        leading = next((index for index, key in enumerate(keys) if key not in cache), len(keys))
        assert sum(cache.match(keys)) == leading


@pytest.fixture
def cache():
    return TieredCache([PrefixCache(2, Lru()), PrefixCache(2, Lru())])


def test_match_counts_blocks_by_tier(cache):
    cache.insert((1, 2))
    cache.insert((3,))
    assert cache.match((1, 2, 3, 4)) == [2, 1]
    assert cache.match((4, 1)) == [0, 0]
    assert (cache.tier_of(1), cache.tier_of(3), cache.tier_of(4)) == (1, 0, None)


def test_a_hit_moves_a_block_to_the_first_tier(cache):
    cache.insert((1, 2))
    cache.insert((3,))
    assert cache.touch((1,), 1) == []
    assert (cache.tier_of(1), cache.tier_of(2)) == (0, 1)
    assert [tier.hits for tier in cache.tiers] == [0, 1]
    assert cache.tiers[1].removals[RemovalReason.MOVED] == 1
    assert cache.insert((4, 5)) == [2]


def test_held_blocks_stay_in_their_tier(cache):
    cache.insert((1, 2))
    cache.insert((3,))
    for key in (1, 2, 3):
        cache.hold(key)
    cache.touch((1,), 1)
    assert cache.tier_of(1) == 1
    assert cache.insert((4,)) == []
    assert cache.tier_of(4) == 1
    cache.hold(4)
    assert cache.insert((5,)) == [5], "no tier has room"
    cache.release(1)
    cache.touch((1,), 1)
    assert cache.tier_of(1) == 1, "all blocks of the first tier are held"
    cache.release(2)
    cache.touch((1,), 1)
    assert cache.tier_of(1) == 0


def test_rejects_holds_of_missing_blocks(cache):
    with pytest.raises(KeyError):
        cache.hold(1)
    with pytest.raises(KeyError):
        cache.release(1)


def test_rejects_an_empty_list_of_tiers():
    with pytest.raises(ValueError, match="at least one tier"):
        TieredCache([])
