"""The prefix cache of one tier: eviction, and protection of pinned blocks and of blocks in use."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import caches
from support.caches import RecordingObserver
from twofold.kvcache.cache import PinnedBlocks, PrefixCache, RemovalReason
from twofold.kvcache.eviction import EVICTIONS, create_eviction
from twofold.kvcache.eviction.lru import Lru

CAPACITY = 6

prompts = caches.prompts(alphabet=3, longest=8)


class Plain:
    """Reference LRU cache, which keeps its keys in a list."""

    def __init__(self, capacity):
        self.capacity, self.order, self.holds, self.pins = capacity, [], Counter(), {}

    def match(self, keys):
        return next((index for index, key in enumerate(keys) if key not in self.order), len(keys))

    def use(self, key):
        if not self.held(key):
            self.order.remove(key)
            self.order.append(key)

    def held(self, key):
        return self.holds[key] or key in self.pins

    def insert(self, keys, start):
        evicted = []
        for key in keys[start:]:
            if key in self.order:
                self.use(key)
                continue
            if len(self.order) == self.capacity:
                victim = next((each for each in self.order if not self.held(each) and each not in keys), None)
                if victim is None:
                    continue
                self.order.remove(victim)
                evicted.append(victim)
            self.order.append(key)
        return evicted

    def release(self, key):
        self.holds[key] -= 1
        self.use(key)

    def expire(self, now):
        for key in [key for key, until in sorted(self.pins.items(), key=lambda pin: pin[1]) if until <= now]:
            del self.pins[key]
            self.use(key)


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(["ask", "ask", "ask", "hold", "release", "pin"]), prompts), max_size=40))
def test_matches_a_reference_lru_cache(steps):
    seen = RecordingObserver()
    cache, plain = PrefixCache(CAPACITY, Lru(), seen), Plain(CAPACITY)
    asked = 0
    for now, (action, keys) in enumerate(steps):
        cache.expire(now)
        plain.expire(now)
        found = cache.match(keys)
        assert found == plain.match(keys)
        if action == "ask":
            asked += found
            cache.touch(keys, found)
            for key in keys[:found]:
                plain.use(key)
            assert cache.insert(keys, found) == plain.insert(keys, found)
        elif action == "hold" and keys[0] in cache:
            cache.hold(keys[0])
            plain.holds[keys[0]] += 1
        elif action == "release" and plain.holds[keys[0]]:
            cache.release(keys[0])
            plain.release(keys[0])
        elif action == "pin":
            # Distinct expiries make the order of expiry unambiguous.
            pinned = cache.pin(keys[:1], now + 2.5)
            assert pinned == (found > 0 and (keys[0] in plain.pins or len(plain.pins) < CAPACITY // 2))
            if pinned:
                plain.pins[keys[0]] = now + 2.5
        assert seen.keys == set(plain.order)
        assert len(cache) == len(plain.order) <= CAPACITY
        assert cache.pinned == len(plain.pins)
    assert cache.hits == asked
    assert sum(cache.removals.values()) == len(seen.reasons) == cache.removals[RemovalReason.CAPACITY]


@pytest.mark.parametrize("name", EVICTIONS)
@given(prompts=st.lists(prompts, max_size=30))
def test_reports_all_evictions_with_every_policy(name, prompts):
    cache, there = PrefixCache(CAPACITY, create_eviction(name)), set()
    gone = 0
    for keys in prompts:
        found = cache.match(keys)
        cache.touch(keys, found)
        evicted = cache.insert(keys, found)
        gone += len(evicted)
        there = {key for key in there | set(keys) if key in cache}
        assert not set(evicted) & there
        assert cache.match(keys) >= min(len(keys), CAPACITY), "nothing is held, so only the end may be missing"
        assert len(cache) == len(there) <= CAPACITY
    assert gone == cache.removals[RemovalReason.CAPACITY]


@pytest.fixture
def seen():
    return RecordingObserver()


@pytest.fixture
def cache(seen):
    return PrefixCache(4, Lru(), seen)


def test_a_held_block_cannot_be_removed(cache, seen):
    cache.insert((1, 2))
    cache.pin((1,), 100.0)
    cache.hold(1)
    with pytest.raises(ValueError, match="held"):
        cache.remove(1, RemovalReason.DAMAGED)
    cache.release(1)
    cache.remove(1, RemovalReason.DAMAGED)
    assert (cache.match((1, 2)), len(cache), cache.pinned) == (0, 1, 0)
    assert (seen.keys, seen.reasons) == ({2}, [RemovalReason.DAMAGED])


def test_never_evicts_held_blocks(cache):
    cache.insert((1, 2, 3, 4))
    for key in (1, 2, 3):
        cache.hold(key)
    assert cache.insert((5,)) == [4]
    cache.hold(5)
    assert not cache.has_room
    assert cache.insert((6, 7)) == []
    assert cache.match((6,)) == 0


def test_pins_last_until_the_latest_expiry(cache):
    cache.insert((1, 2))
    assert cache.pin((1, 2, 9), 10.0) == 2
    assert cache.pin((1,), 5.0) == 1
    assert cache.pin((1,), 20.0) == 1
    cache.expire(9.9)
    cache.insert((3, 4, 5, 6))
    assert (cache.match((1, 2)), cache.pinned) == (2, 2)
    cache.expire(10.0)
    cache.insert((7, 8, 9))
    assert (1 in cache, 2 in cache, cache.pinned) == (True, False, 1)
    assert cache.unpin_next()
    assert (cache.pinned, cache.unpin_next()) == (0, False)


def test_pins_at_most_half_of_the_capacity(cache):
    cache.insert((1, 2, 3, 4))
    assert cache.pin((1, 2, 3, 4), 10.0) == 2
    assert cache.pin((1, 2), 20.0) == 2, "pins can be extended"


def test_a_prompt_does_not_evict_its_own_blocks(cache):
    assert cache.insert((1, 2, 3, 4, 5, 6)) == []
    assert cache.match((1, 2, 3, 4, 5, 6)) == 4
    assert cache.misses == 6


def test_rejects_a_capacity_of_zero():
    with pytest.raises(ValueError, match="room for at least one block"):
        PrefixCache(0, Lru())


def test_pinning_again_keeps_the_later_expiry():
    pins = PinnedBlocks()
    for until in (10.0, 30.0, 20.0):
        pins.pin(1, until)
    assert (pins.expire(29.0), len(pins)) == ([], 1)
    assert (pins.expire(30.0), len(pins)) == ([1], 0)


def test_pop_takes_the_pin_with_the_earliest_expiry():
    pins = PinnedBlocks()
    for key, until in ((1, 30.0), (2, 20.0), (3, 10.0), (4, 5.0)):
        pins.pin(key, until)
    assert (pins.pop(), 4 in pins) == (4, False)
    pins.pin(3, 40.0)
    pins.drop(2)
    assert pins.pop() == 1
    assert pins.expire(40.0) == [3]
    assert pins.pop() is None


def test_repeated_pins_do_not_grow_the_heap():
    pins = PinnedBlocks()
    for number in range(1000):
        pins.pin(number % 7, float(number))
        if number % 3 == 0:
            pins.drop(number % 7)
    assert len(pins._expiries) < 40
    left = len(pins)
    assert len(pins.expire(1000.0)) == left


def test_pins_of_one_prompt_expire_from_its_end():
    pins = PinnedBlocks()
    for key in (1, 2, 3):
        pins.pin(key, 10.0)
    assert pins.pop() == 3
    assert pins.expire(10.0) == [2, 1]
