"""Block accounts that count, held against those that know each block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.errors import OutOfBlocksError
from twofold.kvcache.allocator import BlockCounts
from twofold.kvcache.paged import PagedBlockAllocator

NUM_BLOCKS, BLOCK_SIZE = 12, 4

# What to do, for which of six owners, about how many tokens.
steps = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "extend", "release", "begin", "begin", "end"]),
        st.sampled_from("abcdef"),
        st.integers(0, 30),
    ),
    max_size=80,
)


class Accounts:
    """Block accounts, and the latest grant of each owner."""

    def __init__(self, blocks):
        self.blocks, self.grants = blocks, {}

    def apply(self, action, owner, tokens):
        """What came of it, in the words of what was raised."""
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
def test_counting_gives_the_numbers_and_errors_of_knowing_each_block(steps):
    """Whatever is done in whatever order; and nothing is held in the end."""
    known = Accounts(PagedBlockAllocator(NUM_BLOCKS, BLOCK_SIZE))
    counted = Accounts(BlockCounts(NUM_BLOCKS, BLOCK_SIZE))
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


@pytest.mark.parametrize("accounts", [PagedBlockAllocator, BlockCounts])
def test_accounts_need_something_to_count(accounts):
    """No blocks, or blocks without tokens, are a mistake of the caller."""
    with pytest.raises(ValueError, match="at least one block"):
        accounts(0, 16)
    with pytest.raises(ValueError, match="at least one token"):
        accounts(4, 0)


def test_a_long_prompt_costs_what_a_short_one_does():
    """No list of a million blocks is made for a million tokens: their number is all there is."""
    counted = BlockCounts(1_000_000, 1)
    grant = counted.allocate("a", 900_000)
    assert counted.num_free == 100_000
    assert len(counted.blocks_of(grant)) == 0
