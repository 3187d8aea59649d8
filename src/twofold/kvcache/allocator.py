"""The block accounts: who holds how much of an instance's paged KV cache.

Blocks are held by their owner (the request that needs their contents) and by transfers (reads or writes that
may still touch their memory). They are free only when neither holds them, so an aborted request never gives
away memory that a peer, or the running batch, is still writing to.

A live worker needs to know which blocks (`blocks.BlockManager`); a simulation needs to know how many
(`counts.BlockCounts`), at a cost that does not grow with the length of a prompt.

Block accounts that count: each operation takes the same time however many blocks it is about.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from twofold.errors import OutOfBlocksError


@mypyc_attr(free_list_len=1)
class BlockAllocation:
    """Blocks given to `owner` at once or bit by bit; they become free together, when nothing holds them."""

    __slots__ = ("blocks", "owned", "owner", "transfers")

    def __init__(self, owner: str, blocks: int) -> None:
        self.owner = owner
        self.blocks = blocks
        self.owned = True
        self.transfers = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockAllocator(ABC):
    """Accounts of `num_blocks` blocks of `block_size` tokens each, of which `num_free` can be given.

    `num_in_flight` counts those that some transfer may still touch: all of their owner's, with what it gets meanwhile.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("block accounts need at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self.num_in_flight = 0

    @abstractmethod
    def blocks_of(self, grant: BlockAllocation) -> Sequence[int]:
        """The blocks of a grant in the order of its tokens; empty where only their number is known."""
        ...

    @abstractmethod
    def _give(self, grant: BlockAllocation, blocks: int) -> None:
        """That many more free blocks are the grant's."""
        ...

    @abstractmethod
    def _take_back(self, grant: BlockAllocation) -> None:
        """All blocks of the grant are free."""
        ...

    def blocks_for(self, tokens: int) -> int:
        """How many blocks `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def fits(self, tokens: int) -> bool:
        """Whether `tokens` more tokens would get blocks now."""
        return -(-tokens // self.block_size) <= self.num_free

    def allocate(self, owner: str, tokens: int) -> BlockAllocation:
        """Give an owner blocks for `tokens` tokens; raises OutOfBlocksError and changes nothing if they lack."""
        grant = BlockAllocation(owner, 0)
        self.extend(grant, tokens)
        return grant

    def extend(self, grant: BlockAllocation, tokens: int) -> None:
        """Give an owner blocks for `tokens` tokens more; raises OutOfBlocksError and changes nothing if they lack."""
        blocks = -(-tokens // self.block_size)
        if blocks > self.num_free:
            raise OutOfBlocksError(f"{grant.owner} needs {blocks} blocks and {self.num_free} are free")
        self._give(grant, blocks)
        self.num_free -= blocks
        grant.blocks += blocks
        if grant.transfers:
            self.num_in_flight += blocks

    def release(self, grant: BlockAllocation) -> None:
        """The owner is done with its blocks; they become free when no transfer touches them."""
        if not grant.owned:
            raise ValueError(f"{grant.owner} does not own these blocks any more")
        grant.owned = False
        if not grant.transfers:
            self._free(grant)

    def freed_by(self, grants: Sequence[BlockAllocation]) -> int:
        """How many blocks become free when these grants, which no transfer touches, are all released."""
        blocks = 0
        for grant in grants:
            blocks += grant.blocks
        return blocks

    def begin_transfer(self, grant: BlockAllocation) -> None:
        """From now on one transfer more may touch these blocks."""
        if not grant.owned:
            raise ValueError(f"{grant.owner} does not own these blocks any more")
        grant.transfers += 1
        if grant.transfers == 1:
            self.num_in_flight += grant.blocks

    def end_transfer(self, grant: BlockAllocation) -> None:
        """One of the transfers that were begun will touch these blocks no more."""
        if not grant.transfers:
            raise ValueError(f"no transfer of the blocks of {grant.owner} is in flight")
        grant.transfers -= 1
        if not grant.transfers:
            self.num_in_flight -= grant.blocks
            if not grant.owned:
                self._free(grant)

    def _free(self, grant: BlockAllocation) -> None:
        self.num_free += grant.blocks
        self._take_back(grant)


class BlockCounts(BlockAllocator):
    """`BlockAllocator` for a simulation."""

    def blocks_of(self, grant: BlockAllocation) -> tuple[int, ...]:  # noqa: ARG002  (which they are, nobody knows)
        return ()

    def _give(self, grant: BlockAllocation, blocks: int) -> None:
        pass

    def _take_back(self, grant: BlockAllocation) -> None:
        pass
