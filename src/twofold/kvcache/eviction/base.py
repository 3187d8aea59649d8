"""The eviction seam: which block goes first when a memory is full?"""

from abc import ABC, abstractmethod
from collections.abc import Container

from mypy_extensions import mypyc_attr

from twofold.request import BlockKey


@mypyc_attr(allow_interpreted_subclasses=True)
class Eviction(ABC):
    """Ranks the blocks of one memory that may go: those that are in it and that nobody holds.

    It is told of everything that happens to a block, each time once: stored, hit as often as it is, held and
    released in turn, and forgotten when it is gone, whether it was held or not. Every operation takes a time that does
    not grow with the number of blocks.
    """

    @abstractmethod
    def stored(self, key: BlockKey, position: int) -> None:
        """A block is in the memory from now on; `position` is its index in its prompt."""
        ...

    @abstractmethod
    def hit(self, key: BlockKey) -> None:
        """A request found the block here, which may be held."""
        ...

    @abstractmethod
    def hold(self, key: BlockKey) -> None:
        """The block may not go."""
        ...

    @abstractmethod
    def release(self, key: BlockKey) -> None:
        """The block may go again, and was in use until now."""
        ...

    @abstractmethod
    def forget(self, key: BlockKey) -> None:
        """The block is not in the memory any more."""
        ...

    @abstractmethod
    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        """Who goes first of those that are not to be kept; None when none may go. It stays until it is forgotten.

        Takes a time that does not grow with the number of blocks, but with how many of them are to be kept.
        """
        ...
