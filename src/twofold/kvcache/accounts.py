"""The block accounts seam: who holds how much of an instance's paged KV cache.

Blocks are held by their owner (the request that needs their contents) and by transfers (reads or writes that
may still touch their memory). They are free only when neither holds them, so an aborted request never gives
away memory that a peer, or the running batch, is still writing to.

A live worker needs to know which blocks (`blocks.BlockManager`); a simulation needs to know how many
(`counts.BlockCounts`), at a cost that does not grow with the length of a prompt.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockAccounts(ABC):
    """Accounts of `num_blocks` blocks of `block_size` tokens each."""

    num_blocks: int
    block_size: int

    @property
    @abstractmethod
    def num_free(self) -> int: ...

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """Blocks that some transfer may still touch."""
        ...

    @abstractmethod
    def blocks_for(self, tokens: int) -> int:
        """How many blocks `tokens` tokens take."""
        ...

    @abstractmethod
    def fits(self, tokens: int) -> bool:
        """Whether `tokens` more tokens would get blocks now."""
        ...

    @abstractmethod
    def owns(self, owner: str) -> bool: ...

    @abstractmethod
    def blocks_of(self, owner: str) -> Sequence[int]:
        """The blocks of an owner in the order of its tokens; empty where only their number is known."""
        ...

    @abstractmethod
    def allocate(self, owner: str, tokens: int) -> None:
        """Give a new owner blocks for `tokens` tokens; raises OutOfBlocksError and changes nothing if they lack."""
        ...

    @abstractmethod
    def extend(self, owner: str, tokens: int) -> None:
        """Give an owner blocks for `tokens` tokens more; raises OutOfBlocksError and changes nothing if they lack."""
        ...

    @abstractmethod
    def release(self, owner: str) -> None:
        """The owner is done with its blocks; those that no transfer touches become free."""
        ...

    @abstractmethod
    def begin_transfer(self, transfer: str, owner: str) -> None:
        """From now on `transfer` may touch the blocks that `owner` has now."""
        ...

    @abstractmethod
    def end_transfer(self, transfer: str) -> None:
        """`transfer` will touch its blocks no more; those that no owner needs become free."""
        ...
