"""Block accounts that count, held against those that know each block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.errors import OutOfBlocksError
from twofold.kvcache.blocks import BlockManager
from twofold.kvcache.counts import BlockCounts

NUM_BLOCKS, BLOCK_SIZE = 12, 4

# What to do, for which of six owners, with which of two transfers, about how many tokens.
steps = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "extend", "release", "begin", "begin", "end"]),
        st.sampled_from("abcdef"),
        st.sampled_from("12"),
        st.integers(0, 30),
    ),
    max_size=80,
)


def apply(blocks, action, owner, transfer, tokens):
    """What came of it: the name and, for the errors that users of the accounts read, the text of what was raised."""
    calls = {
        "allocate": lambda: blocks.allocate(owner, tokens),
        "extend": lambda: blocks.extend(owner, tokens),
        "release": lambda: blocks.release(owner),
        "begin": lambda: blocks.begin_transfer(owner + transfer, owner),
        "end": lambda: blocks.end_transfer(owner + transfer),
    }
    try:
        calls[action]()
    except (OutOfBlocksError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    except KeyError:
        return "KeyError"
    return None


def numbers(blocks):
    return blocks.num_blocks, blocks.block_size, blocks.num_free, blocks.num_in_flight


@settings(max_examples=1000)
@given(steps)
def test_counting_gives_the_numbers_and_errors_of_knowing_each_block(steps):
    """Whatever is done in whatever order; while a transfer runs, owners do not grow (that is the next test)."""
    known, counted = BlockManager(NUM_BLOCKS, BLOCK_SIZE), BlockCounts(NUM_BLOCKS, BLOCK_SIZE)
    moving = set()
    for action, owner, transfer, tokens in steps:
        if action == "extend" and any(name.startswith(owner) for name in moving):
            continue
        raised = apply(known, action, owner, transfer, tokens)
        assert raised == apply(counted, action, owner, transfer, tokens)
        if raised is None and action in ("begin", "end"):
            moving ^= {owner + transfer}
        assert numbers(known) == numbers(counted)
        assert known.fits(tokens) == counted.fits(tokens)
        assert known.owns(owner) == counted.owns(owner)
        assert known.blocks_for(tokens) == counted.blocks_for(tokens)


@settings(max_examples=300)
@given(steps)
def test_blocks_that_came_during_a_transfer_count_as_touched_until_it_ends(steps):
    """Then counting may hold more than is held, never less, and nothing in the end."""
    known, counted = BlockManager(NUM_BLOCKS, BLOCK_SIZE), BlockCounts(NUM_BLOCKS, BLOCK_SIZE)
    owners, moving = set(), set()
    for action, owner, transfer, tokens in steps:
        if action in ("allocate", "extend") and not counted.fits(tokens):
            continue
        raised = apply(counted, action, owner, transfer, tokens)
        assert raised == apply(known, action, owner, transfer, tokens)
        if raised is None:
            owners |= {owner} if action == "allocate" else set()
            owners -= {owner} if action == "release" else set()
            moving ^= {owner + transfer} if action in ("begin", "end") else set()
        assert 0 <= counted.num_free <= known.num_free
        assert known.num_in_flight <= counted.num_in_flight <= NUM_BLOCKS - counted.num_free
    for owner in owners:
        counted.release(owner)
    for transfer in moving:
        counted.end_transfer(transfer)
    assert numbers(counted) == (NUM_BLOCKS, BLOCK_SIZE, NUM_BLOCKS, 0)


@pytest.mark.parametrize("accounts", [BlockManager, BlockCounts])
def test_accounts_need_something_to_count(accounts):
    """No blocks, or blocks without tokens, are a mistake of the caller."""
    with pytest.raises(ValueError, match="at least one block"):
        accounts(0, 16)
    with pytest.raises(ValueError, match="at least one token"):
        accounts(4, 0)


def test_a_long_prompt_costs_what_a_short_one_does():
    """No list of a million blocks is made for a million tokens: their number is all there is."""
    counted = BlockCounts(1_000_000, 1)
    counted.allocate("a", 900_000)
    assert counted.num_free == 100_000
    assert len(counted.blocks_of("a")) == 0
