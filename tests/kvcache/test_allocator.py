"""Block allocators of live workers and of simulations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.errors import OutOfBlocksError
from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.paged import PagedBlockAllocator


def test_frees_blocks_after_release_and_the_last_transfer():
    blocks = PagedBlockAllocator(num_blocks=4, block_size=16)
    grant = blocks.allocate("a", 33)
    blocks.begin_transfer(grant)
    blocks.release(grant)
    assert (blocks.num_free, blocks.num_in_flight) == (1, 3)
    blocks.end_transfer(grant)
    assert (blocks.num_free, blocks.num_in_flight) == (4, 0)


def test_a_failed_allocation_changes_nothing():
    blocks = PagedBlockAllocator(num_blocks=2, block_size=4)
    with pytest.raises(OutOfBlocksError, match="a needs 3 blocks and 2 are free"):
        blocks.allocate("a", 9)
    assert blocks.num_free == 2


def test_rejects_a_transfer_of_released_blocks():
    blocks = PagedBlockAllocator(num_blocks=2, block_size=4)
    grant = blocks.allocate("a", 8)
    blocks.release(grant)
    with pytest.raises(ValueError, match="a has already released these blocks"):
        blocks.begin_transfer(grant)
    assert blocks.num_in_flight == 0


def test_extend_appends_blocks_in_order():
    blocks = PagedBlockAllocator(num_blocks=4, block_size=4)
    grant = blocks.allocate("a", 5)
    blocks.allocate("b", 1)
    blocks.extend(grant, 3)
    assert list(blocks.blocks_of(grant)) == [0, 1, 3]
    with pytest.raises(OutOfBlocksError):
        blocks.extend(grant, 1)
    assert list(blocks.blocks_of(grant)) == [0, 1, 3]


def test_rejects_a_second_release_or_transfer_end():
    blocks = PagedBlockAllocator(num_blocks=2, block_size=4)
    grant = blocks.allocate("a", 8)
    with pytest.raises(ValueError, match="no transfer of the blocks of a is in flight"):
        blocks.end_transfer(grant)
    blocks.release(grant)
    with pytest.raises(ValueError, match="a has already released"):
        blocks.release(grant)
    assert blocks.num_free == 2


@given(st.lists(st.tuples(st.sampled_from("axrbbe"), st.integers(0, 5), st.integers(1, 40)), max_size=60))
@settings(max_examples=300)
def test_no_block_is_leaked_or_owned_twice(steps):
    blocks = PagedBlockAllocator(num_blocks=12, block_size=4)
    owned, moving = {}, []
    for action, number, tokens in steps:
        if action == "a" and number not in owned and blocks.fits(tokens):
            owned[number] = blocks.allocate(str(number), tokens)
        elif action == "x" and number in owned and blocks.fits(tokens):
            blocks.extend(owned[number], tokens)
        elif action == "r" and number in owned:
            blocks.release(owned.pop(number))
        elif action == "b" and number in owned:
            blocks.begin_transfer(owned[number])
            moving.append(owned[number])
        elif action == "e" and moving:
            blocks.end_transfer(moving.pop(number % len(moving)))
        held = [block for grant in {*owned.values(), *moving} for block in blocks.blocks_of(grant)]
        assert len(held) == len(set(held)), "a block has two owners"
        assert blocks.num_free == blocks.num_blocks - len(held)
        assert blocks.num_in_flight == sum(len(blocks.blocks_of(grant)) for grant in set(moving))
    for grant in owned.values():
        blocks.release(grant)
    for grant in moving:
        blocks.end_transfer(grant)
    assert (blocks.num_free, blocks.num_in_flight) == (blocks.num_blocks, 0)


NUM_BLOCKS, BLOCK_SIZE = 12, 4

# (operation, owner, number of tokens)
steps = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "extend", "release", "begin", "begin", "end"]),
        st.sampled_from("abcdef"),
        st.integers(0, 30),
    ),
    max_size=80,
)


class Accounts:
    """A block allocator and the allocations of several requests."""

    def __init__(self, blocks):
        self.blocks, self.grants = blocks, {}

    def apply(self, action, owner, tokens):
        """Apply an operation; return its error as text, or None."""
        grant = self.grants.get(owner)
        try:
            if action == "allocate" and (grant is None or not (grant.owned or grant.transfers)):
                self.grants[owner] = self.blocks.allocate(owner, tokens)
            elif grant is not None and action == "extend" and grant.owned:
                self.blocks.extend(grant, tokens)
            elif grant is not None and action == "release":
                self.blocks.release(grant)
            elif grant is not None and action == "begin":
                self.blocks.begin_transfer(grant)
            elif grant is not None and action == "end":
                self.blocks.end_transfer(grant)
        except (OutOfBlocksError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    @property
    def numbers(self):
        blocks = self.blocks
        return blocks.num_blocks, blocks.block_size, blocks.num_free, blocks.num_in_flight


@settings(max_examples=1000)
@given(steps)
def test_counting_agrees_with_tracking_block_ids(steps):
    known = Accounts(PagedBlockAllocator(NUM_BLOCKS, BLOCK_SIZE))
    counted = Accounts(BlockAllocator(NUM_BLOCKS, BLOCK_SIZE))
    for action, owner, tokens in steps:
        assert known.apply(action, owner, tokens) == counted.apply(action, owner, tokens)
        assert known.numbers == counted.numbers
        assert known.blocks.fits(tokens) == counted.blocks.fits(tokens)
        assert known.blocks.blocks_for(tokens) == counted.blocks.blocks_for(tokens)
        for grant in known.grants.values():
            if grant.owned or grant.transfers:
                assert len(known.blocks.blocks_of(grant)) == grant.blocks
    for accounts in (known, counted):
        for owner, grant in accounts.grants.items():
            for _ in range(grant.transfers):
                accounts.apply("end", owner, 0)
            if grant.owned:
                accounts.apply("release", owner, 0)
        assert accounts.numbers == (NUM_BLOCKS, BLOCK_SIZE, NUM_BLOCKS, 0)


@pytest.mark.parametrize("accounts", [PagedBlockAllocator, BlockAllocator])
def test_rejects_empty_caches(accounts):
    with pytest.raises(ValueError, match="at least one block"):
        accounts(0, 16)
    with pytest.raises(ValueError, match="at least one token"):
        accounts(4, 0)


def test_counting_creates_no_list_of_blocks():
    counted = BlockAllocator(1_000_000, 1)
    grant = counted.allocate("a", 900_000)
    assert counted.num_free == 100_000
    assert len(counted.blocks_of(grant)) == 0
