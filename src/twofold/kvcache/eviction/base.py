"""The interface of eviction policies, which choose the block that leaves a full memory first."""

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.request import BlockKey


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy(ABC):
    """Ranks the blocks of one memory that are not held.

    The memory reports each event once: `stored`, every `hit`, `hold` and `release` in turn, and `forget` when the block
    is gone, held or not. The time of an operation does not depend on the number of blocks.
    """

    help: ClassVar[str] = ""  # one line for command-line help

    @abstractmethod
    def stored(self, key: BlockKey, position: int) -> None:
        """A block was added; `position` is its index in its prompt."""

    @abstractmethod
    def hit(self, key: BlockKey) -> None:
        """A request reused the block, which may be held."""

    @abstractmethod
    def hold(self, key: BlockKey) -> None:
        """The block must not be evicted."""

    @abstractmethod
    def release(self, key: BlockKey) -> None:
        """The block may be evicted again. It was in use until now."""

    @abstractmethod
    def forget(self, key: BlockKey) -> None:
        """The block was removed."""

    @abstractmethod
    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        """The next block to evict that is not in `keep`, or None. The policy keeps it until `forget`.

        The time grows with the number of blocks in `keep` only.
        """
