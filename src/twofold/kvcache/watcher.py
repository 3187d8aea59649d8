"""Who wants to know which blocks a memory has: told of each as it comes and as it goes."""

from abc import ABC, abstractmethod
from enum import StrEnum

from mypy_extensions import mypyc_attr

from twofold.request import BlockKey


class Removal(StrEnum):
    """Why a block is not in a memory any more."""

    CAPACITY = "capacity"  # its room was wanted
    MOVED = "moved"  # it is in another tier now
    DAMAGED = "damaged"  # its checksum is wrong
    DROPPED = "dropped"  # it was never completed, or somebody asked for it to go
    REWRITTEN = "rewritten"  # a request took it to write its last token again


@mypyc_attr(allow_interpreted_subclasses=True)
class CacheWatcher(ABC):
    """Told in the order in which things happen. It must not change the memory that tells it."""

    @abstractmethod
    def stored(self, key: BlockKey) -> None:
        """A block can be read from now on."""
        ...

    @abstractmethod
    def removed(self, key: BlockKey, reason: Removal) -> None:
        """A block that could be read cannot be any more; its room is given away only after this returns."""
        ...
