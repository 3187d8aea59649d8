"""Allocation of prompts whose first blocks are cached, checked against simulated memory contents."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.caches import RecordingObserver
from twofold.errors import OutOfBlocksError
from twofold.kvcache.cache import PrefixCache, RemovalReason
from twofold.kvcache.eviction import EVICTIONS, create_eviction
from twofold.kvcache.eviction.lru import Lru
from twofold.kvcache.paged import PrefixBlockAllocator
from twofold.kvcache.prefix import prefix_keys

NUM_BLOCKS, SIZE, MOST_PINNED = 10, 2, 6


class Running:
    """A running request, its block allocation and its progress."""

    def __init__(self, tokens, reused, keys):
        self.tokens, self.grant, self.keys = tokens, reused.grant, keys
        self.written, self.copy = reused.tokens, reused.copy
        self.transfers, self.owned = 0, True


class Memory:
    """Simulated KV memory, which stores tokens instead of KV."""

    def __init__(self, name):
        self.seen = RecordingObserver()
        self.blocks = PrefixBlockAllocator(SIZE, PrefixCache(NUM_BLOCKS, create_eviction(name), self.seen, MOST_PINNED))
        # By block: all tokens of the prompt up to the last token written to the block.
        self.contents = {}
        self.requests = []

    def start(self, tokens, output):
        keys = tuple(prefix_keys(tokens, SIZE))
        free, wanted = self.blocks.num_free, len(tokens) + output
        try:
            reused = self.blocks.allocate_prompt("r", wanted, keys, len(tokens))
        except OutOfBlocksError:
            assert self.blocks.num_free == free
            assert self.blocks.blocks_for(wanted) > free
            return
        assert free - self.blocks.num_free <= self.blocks.blocks_for(wanted)
        assert reused.tokens < len(tokens)
        request = Running(tokens, reused, keys)
        self.requests.append(request)
        if reused.copy is None:
            self.check_prefix(request)

    def check_prefix(self, request):
        """Check that a request's blocks contain its tokens."""
        held = self.blocks.blocks_of(request.grant)
        for end in range(1, request.written + 1):
            assert self.contents[held[(end - 1) // SIZE]][:end] == request.tokens[:end]

    def compute(self, request):
        """Write the KV of a request's next token."""
        if not request.owned:
            return
        held = self.blocks.blocks_of(request.grant)
        if request.copy is not None:
            source, target = request.copy
            self.write(request, target, self.contents[source])
            self.blocks.copied(request.grant)
            request.copy = None
            self.check_prefix(request)
        if request.written < len(request.tokens):
            request.written += 1
            self.write(request, held[(request.written - 1) // SIZE], request.tokens[: request.written])
        self.blocks.publish(request.grant, request.keys[: request.written // SIZE])

    def write(self, request, block, prefix):
        assert block not in self.blocks._keys, "wrote to a cached block"
        others = [other for other in self.requests if other is not request]
        assert not any(block in self.blocks.blocks_of(other.grant) for other in others), "wrote to a shared block"
        self.contents[block] = prefix

    def finish(self, request):
        while request.owned and request.written < len(request.tokens):
            self.compute(request)
        self.release(request)

    def release(self, request):
        if request.owned:
            self.blocks.release(request.grant)
            request.owned = False
            self.forget(request)

    def begin(self, request):
        if request.owned:
            self.blocks.begin_transfer(request.grant)
            request.transfers += 1

    def end(self, request):
        if request.transfers:
            self.blocks.end_transfer(request.grant)
            request.transfers -= 1
            self.forget(request)

    def extend(self, request):
        if request.owned and self.blocks.fits(3):
            self.blocks.extend(request.grant, 3)

    def pin(self, prompt, until):
        """Pin the cached blocks of a prompt."""
        keys = tuple(prefix_keys(prompt, SIZE))
        here = self.blocks.cache.match(keys)
        pinned = self.blocks.cache.pin(keys, until)
        assert pinned == here or self.blocks.cache.pinned == MOST_PINNED

    def forget(self, request):
        if not request.owned and not request.transfers:
            self.requests.remove(request)

    def check(self):
        held = {block for request in self.requests for block in self.blocks.blocks_of(request.grant)}
        held |= {request.copy[0] for request in self.requests if request.copy is not None}
        assert self.blocks.num_free == NUM_BLOCKS - len(held)
        assert self.seen.keys == set(self.blocks._cached)
        assert len(self.blocks.cache) <= NUM_BLOCKS
        assert self.blocks.cache.pinned <= min(MOST_PINNED, len(self.blocks.cache))


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
steps = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("start", "compute", "compute", "compute", "finish", "release", "begin", "end", "extend"),
                *("pin", "expire"),
            ]
        ),
        st.integers(0, 5),
        tokens,
    ),
    max_size=80,
)


@pytest.mark.parametrize("name", EVICTIONS)
@settings(max_examples=400)
@given(steps)
def test_cached_blocks_have_the_right_contents_and_stay_read_only(name, steps):
    memory = Memory(name)
    for action, number, prompt in steps:
        if action == "start":
            memory.start(prompt, number)
        elif action == "pin":
            memory.pin(prompt, float(number))
        elif action == "expire":
            memory.blocks.cache.expire(float(number))
        elif memory.requests:
            getattr(memory, action)(memory.requests[number % len(memory.requests)])
        memory.check()
    for request in list(memory.requests):
        for _ in range(request.transfers):
            memory.blocks.end_transfer(request.grant)
        if request.owned:
            memory.blocks.release(request.grant)
    assert (memory.blocks.num_free, memory.blocks.num_in_flight) == (NUM_BLOCKS, 0)
    assert len(memory.blocks.cache) <= NUM_BLOCKS
    assert len(memory.blocks.blocks_of(memory.blocks.allocate("all", NUM_BLOCKS * SIZE))) == NUM_BLOCKS
    assert not memory.seen.keys


@pytest.fixture
def seen():
    return RecordingObserver()


@pytest.fixture
def blocks(seen):
    return PrefixBlockAllocator(4, PrefixCache(6, Lru(), seen))


def publish(blocks, keys, prompt_tokens):
    reused = blocks.allocate_prompt("first", prompt_tokens, keys, prompt_tokens)
    blocks.publish(reused.grant, keys)
    return reused.grant


def test_shares_a_prefix_during_and_after_its_use(blocks):
    first = publish(blocks, (1, 2), 9)
    second = blocks.allocate_prompt("second", 10, (1, 2), 10)
    assert (second.tokens, second.copy, blocks.num_free) == (8, None, 2)
    assert blocks.blocks_of(second.grant)[:2] == blocks.blocks_of(first)[:2]
    blocks.release(first)
    assert blocks.num_free == 3
    blocks.release(second.grant)
    assert (blocks.num_free, len(blocks.cache)) == (6, 2)
    assert blocks.allocate_prompt("third", 12, (1, 9), 12).tokens == 4
    assert (blocks.cache.hits, blocks.cache.misses) == (3, 2 + 0 + 2)


def test_copies_the_last_block_of_a_fully_cached_prompt(blocks):
    first = publish(blocks, (1, 2), 8)
    again = blocks.allocate_prompt("again", 8, (1, 2), 8)
    source, target = again.copy
    assert (again.tokens, source) == (7, blocks.blocks_of(first)[1])
    assert list(blocks.blocks_of(again.grant)) == [blocks.blocks_of(first)[0], target]
    blocks.release(first)
    assert blocks.num_free == 3
    blocks.copied(again.grant)
    blocks.copied(again.grant)
    assert blocks.num_free == 4
    blocks.publish(again.grant, (1, 2))
    assert blocks.cache.match((1, 2)) == 2


def test_takes_over_an_unowned_last_block(blocks, seen):
    blocks.release(publish(blocks, (1, 2), 8))
    again = blocks.allocate_prompt("again", 8, (1, 2), 8)
    assert (again.tokens, again.copy, blocks.cache.match((1, 2)), blocks.num_free) == (7, None, 1, 4)
    assert seen.reasons == [RemovalReason.REWRITTEN]
    blocks.publish(again.grant, (1, 2))
    assert blocks.cache.match((1, 2)) == 2


def test_an_abort_before_the_copy_releases_the_source(blocks):
    first = publish(blocks, (1,), 4)
    again = blocks.allocate_prompt("again", 4, (1,), 4)
    blocks.release(first)
    blocks.release(again.grant)
    assert (blocks.num_free, len(blocks.cache)) == (6, 1)


def test_evicts_unused_blocks_from_the_end_of_prompts(blocks, seen):
    blocks.release(publish(blocks, (1, 2, 3), 13))
    held = blocks.allocate_prompt("held", 5, (1,), 5)
    blocks.allocate("large", 12)
    assert seen.keys == {1, 2}
    assert seen.reasons == [RemovalReason.CAPACITY]
    assert not blocks.fits(5)
    with pytest.raises(OutOfBlocksError, match="more needs 2 blocks and 1 are free"):
        blocks.allocate_prompt("more", 8, (7,), 8)
    blocks.allocate("small", 1)
    assert seen.keys == {1}
    assert blocks.blocks_of(held.grant)


def test_keeps_a_duplicate_of_a_published_block_private(blocks):
    first = blocks.allocate_prompt("first", 4, (1,), 4)
    second = blocks.allocate_prompt("second", 4, (1,), 4)
    blocks.publish(first.grant, (1,))
    blocks.publish(second.grant, (1,))
    blocks.release(second.grant)
    assert (blocks.num_free, len(blocks.cache)) == (5, 1)
    with pytest.raises(ValueError, match="first has 1 blocks but publishes 2 keys"):
        blocks.publish(first.grant, (1, 2))


def test_evicts_unpinned_blocks_first(blocks):
    blocks.release(publish(blocks, (1, 2), 9))
    blocks.release(publish(blocks, (3, 4), 9))
    assert blocks.cache.pin((1, 2, 9), 10.0) == 2
    blocks.release(blocks.allocate_prompt("user", 9, (1, 2), 9).grant)
    blocks.release(blocks.allocate("large", 16))
    assert (blocks.cache.match((1, 2)), blocks.cache.match((3, 4)), blocks.cache.pinned) == (2, 0, 2)
    blocks.cache.expire(9.0)
    assert blocks.cache.pinned == 2
    blocks.cache.expire(10.0)
    assert (blocks.cache.pinned, blocks.cache.match((1, 2))) == (0, 2)
    blocks.allocate("all", 24)
    assert len(blocks.cache) == 0


def test_evicts_pinned_blocks_as_a_last_resort(blocks, seen):
    for key, until in ((1, 30.0), (2, 10.0), (3, 20.0)):
        blocks.release(publish(blocks, (key,), 4))
        blocks.cache.pin((key,), until)
    assert blocks.fits(24)
    blocks.allocate("most", 20)
    assert (seen.keys, blocks.cache.pinned) == ({1}, 1)
    blocks.allocate("rest", 4)
    assert (seen.keys, blocks.cache.pinned, blocks.num_free) == (set(), 0, 0)


def test_pins_at_most_the_limit(seen):
    blocks = PrefixBlockAllocator(4, PrefixCache(6, Lru(), seen, max_pinned=2))
    blocks.release(publish(blocks, (1, 2, 3), 13))
    assert (blocks.cache.pin((1, 2, 3), 10.0), blocks.cache.pinned) == (2, 2)
    assert blocks.cache.pin((1, 2), 20.0) == 2
    blocks.cache.expire(10.0)
    assert blocks.cache.pinned == 2


KEYS = [b"a", b"b", b"c", b"d"]


def test_blocks_of_an_allocation_are_cached_once_published():
    blocks = PrefixBlockAllocator(4, PrefixCache(8, Lru()))
    grant, here = blocks.allocate_after("store", 4 * 4, KEYS)
    assert (here, len(blocks.blocks_of(grant)), blocks.num_free) == (0, 4, 4)
    blocks.publish(grant, KEYS[:3])
    blocks.release(grant)
    assert blocks.cache.match(KEYS) == 3
    assert blocks.num_free == 8
    assert not blocks.cache.hits + blocks.cache.misses, "such an allocation counts no hits"


def test_shared_blocks_are_not_reallocated():
    blocks = PrefixBlockAllocator(4, PrefixCache(4, Lru()))
    grant, _ = blocks.allocate_after("store", 4 * 2, KEYS[:2])
    blocks.publish(grant, KEYS[:2])
    lent, here = blocks.allocate_after("reader", 4 * 3, KEYS[:3])
    assert here == 2
    assert list(blocks.blocks_of(lent))[:2] == list(blocks.blocks_of(grant))
    blocks.release(grant)
    with pytest.raises(OutOfBlocksError):
        blocks.allocate_after("other", 4 * 2, [b"x", b"y"])
    blocks.release(lent)
    blocks.allocate_after("other", 4 * 4, [b"w", b"x", b"y", b"z"])
    assert blocks.cache.match(KEYS) == 0
