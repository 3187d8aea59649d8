"""The block accounts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.errors import OutOfBlocksError
from twofold.kvcache.paged import PagedBlockAllocator


def test_a_block_is_free_only_when_neither_request_nor_transfer_holds_it():
    """The rule that keeps a late write from hitting a block that was given to somebody else."""
    blocks = PagedBlockAllocator(num_blocks=4, block_size=16)
    grant = blocks.allocate("a", 33)
    blocks.begin_transfer(grant)
    blocks.release(grant)
    assert (blocks.num_free, blocks.num_in_flight) == (1, 3)
    blocks.end_transfer(grant)
    assert (blocks.num_free, blocks.num_in_flight) == (4, 0)


def test_a_request_that_does_not_fit_takes_nothing():
    """A failed allocation leaves the accounts as they were."""
    blocks = PagedBlockAllocator(num_blocks=2, block_size=4)
    with pytest.raises(OutOfBlocksError, match="a needs 3 blocks and 2 are free"):
        blocks.allocate("a", 9)
    assert blocks.num_free == 2


def test_a_transfer_cannot_touch_a_free_block():
    """In-flight accounting starts while somebody still owns the memory."""
    blocks = PagedBlockAllocator(num_blocks=2, block_size=4)
    grant = blocks.allocate("a", 8)
    blocks.release(grant)
    with pytest.raises(ValueError, match="a does not own these blocks any more"):
        blocks.begin_transfer(grant)
    assert blocks.num_in_flight == 0


def test_an_owner_gets_more_blocks_behind_those_it_has():
    """What it has written stays where it is; what does not fit changes nothing."""
    blocks = PagedBlockAllocator(num_blocks=4, block_size=4)
    grant = blocks.allocate("a", 5)
    blocks.allocate("b", 1)
    blocks.extend(grant, 3)
    assert list(blocks.blocks_of(grant)) == [0, 1, 3]
    with pytest.raises(OutOfBlocksError):
        blocks.extend(grant, 1)
    assert list(blocks.blocks_of(grant)) == [0, 1, 3]


def test_what_is_over_cannot_be_over_again():
    """Blocks that were given back twice would be given away twice."""
    blocks = PagedBlockAllocator(num_blocks=2, block_size=4)
    grant = blocks.allocate("a", 8)
    with pytest.raises(ValueError, match="no transfer of the blocks of a is in flight"):
        blocks.end_transfer(grant)
    blocks.release(grant)
    with pytest.raises(ValueError, match="a does not own"):
        blocks.release(grant)
    assert blocks.num_free == 2


@given(st.lists(st.tuples(st.sampled_from("axrbbe"), st.integers(0, 5), st.integers(1, 40)), max_size=60))
@settings(max_examples=300)
def test_no_block_is_leaked_or_owned_twice(steps):
    """Random sequences of allocate, extend, release, begin and end: the accounts always add up.

    Two transfers may touch the same block, as a hand-off and the running batch of an aborted request do.
    """
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
