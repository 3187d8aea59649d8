"""Interface of eviction policies. A policy chooses the block to remove from a full memory."""

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.request import BlockKey


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy(ABC):
    """Ranks the cached KV blocks of one cache tier, such as GPU memory or disk, in order of eviction."""

    # The memory reports every event of a block: `stored`, each `hit`, `hold` and `release` alternately, and `forget`
    # when the block is removed, even if held. The time of an operation must not depend on the number of blocks.

    help: ClassVar[str] = ""  # one line for command-line help

    @abstractmethod
    def stored(self, key: BlockKey, position: int) -> None:
        """Add a new block; `position` is the index of the block in its prompt."""

    @abstractmethod  # the block may be held
    def hit(self, key: BlockKey) -> None:
        """Record that a request reused a block."""

    @abstractmethod
    def hold(self, key: BlockKey) -> None:
        """Exclude a block from eviction until `release`."""

    @abstractmethod  # counts as a use
    def release(self, key: BlockKey) -> None:
        """Allow the eviction of a held block again."""

    @abstractmethod
    def forget(self, key: BlockKey) -> None:
        """Remove a block from the ranking after its removal from memory."""

    @abstractmethod  # the block stays ranked until `forget`
    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        """Return the next block to evict, or None if all blocks are held or in `keep`."""
