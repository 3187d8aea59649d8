"""The block accounts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.errors import OutOfBlocksError
from twofold.kvcache.blocks import BlockManager


def test_a_block_is_free_only_when_neither_request_nor_transfer_holds_it():
    """The rule that keeps a late write from hitting a block that was given to somebody else."""
    blocks = BlockManager(num_blocks=4, block_size=16)
    blocks.allocate("a", 33)
    blocks.begin_transfer("t", "a")
    blocks.release("a")
    assert (blocks.num_free, blocks.num_owned, blocks.num_in_flight) == (1, 0, 3)
    blocks.end_transfer("t")
    assert (blocks.num_free, blocks.num_in_flight) == (4, 0)


def test_a_request_that_does_not_fit_takes_nothing():
    """A failed allocation leaves the accounts as they were."""
    blocks = BlockManager(num_blocks=2, block_size=4)
    with pytest.raises(OutOfBlocksError):
        blocks.allocate("a", 9)
    assert blocks.num_free == 2
    assert not blocks.owners


def test_a_transfer_cannot_touch_a_free_block():
    """In-flight accounting starts while somebody still owns the memory."""
    blocks = BlockManager(num_blocks=2, block_size=4)
    with pytest.raises(KeyError):
        blocks.begin_transfer("t", "nobody")
    assert blocks.num_in_flight == 0


def test_an_owner_gets_more_blocks_behind_those_it_has():
    """What it has written stays where it is; what does not fit changes nothing."""
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.allocate("a", 5)
    blocks.allocate("b", 1)
    blocks.extend("a", 3)
    assert list(blocks.blocks_of("a")) == [0, 1, 3]
    with pytest.raises(OutOfBlocksError):
        blocks.extend("a", 1)
    assert list(blocks.blocks_of("a")) == [0, 1, 3]


@given(st.lists(st.tuples(st.sampled_from("axrbBeE"), st.integers(0, 5), st.integers(1, 40)), max_size=60))
@settings(max_examples=300)
def test_no_block_is_leaked_or_owned_twice(steps):
    """Random sequences of allocate, extend, release, begin and end: the accounts always add up.

    Two transfers may touch the same block, as a hand-off and the running batch of an aborted request do.
    """
    blocks = BlockManager(num_blocks=12, block_size=4)
    owned: dict[str, tuple[int, ...]] = {}
    moving: dict[str, tuple[int, ...]] = {}
    for action, number, tokens in steps:
        name = str(number)
        transfer = name + ("'" if action.isupper() else "")
        if action == "a" and name not in owned and blocks.fits(tokens):
            blocks.allocate(name, tokens)
        elif action == "x" and name in owned and blocks.fits(tokens):
            blocks.extend(name, tokens)
        elif action == "r" and name in owned:
            blocks.release(name)
            del owned[name]
        elif action in "bB" and name in owned and transfer not in moving:
            moving[transfer] = owned[name]
            blocks.begin_transfer(transfer, name)
        elif action in "eE" and transfer in moving:
            blocks.end_transfer(transfer)
            del moving[transfer]
        if action in "ax" and name in blocks.owners:
            owned[name] = tuple(blocks.blocks_of(name))
        each = [block for held in owned.values() for block in held]
        assert len(each) == len(set(each)), "a block has two owners"
        held = set(each) | {block for group in moving.values() for block in group}
        assert blocks.num_free == blocks.num_blocks - len(held)
        assert blocks.num_owned == len(each)
        assert blocks.num_in_flight == len({block for group in moving.values() for block in group})
    for name in list(owned):
        blocks.release(name)
    for name in list(moving):
        blocks.end_transfer(name)
    assert blocks.num_free == blocks.num_blocks
