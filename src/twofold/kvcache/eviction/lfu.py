"""Least frequently used."""

from twofold.kvcache.eviction.base import RankedEviction
from twofold.request import BlockKey


class Lfu(RankedEviction):
    """Evicts the block with the fewest uses since it was stored, which counts as its first use.

    Ties go to the block that reached its count first. A block that returns starts again at one.
    """

    help = "least frequently used since the block was stored"

    def __init__(self) -> None:
        super().__init__(step=1)

    def stored(self, key: BlockKey, position: int) -> None:
        self.add(key, 1)
