"""Length-aware: as LFU, and what stands later in its prompt goes before what stands earlier."""

from collections.abc import Container

from twofold.kvcache.eviction.base import EvictionPolicy, Ranking
from twofold.request import BlockKey

_POSITION_BITS = 24  # a prompt has fewer than 2^24 blocks


class LengthAware(EvictionPolicy):
    """The block goes first that was used least often since it was stored; of several the one latest in its prompt.

    A block is of use only with all that stand before it, so the end of a prompt is worth least. Source: the
    LengthAwareCache of Mooncake (arXiv 2407.00079 section 4, Table 1).
    """

    def __init__(self) -> None:
        self._ranks: dict[BlockKey, int] = {}  # uses in the high bits, less the position
        self._ranking = Ranking()

    def stored(self, key: BlockKey, position: int) -> None:
        rank = self._ranks[key] = (1 << _POSITION_BITS) - position
        self._ranking.put(key, rank)

    def hit(self, key: BlockKey) -> None:
        rank = self._ranks[key] = self._ranks[key] + (1 << _POSITION_BITS)
        if key in self._ranking:
            self._ranking.drop(key)
            self._ranking.put(key, rank)

    def hold(self, key: BlockKey) -> None:
        self._ranking.drop(key)

    def release(self, key: BlockKey) -> None:
        self._ranking.put(key, self._ranks[key])

    def forget(self, key: BlockKey) -> None:
        self._ranking.drop(key)
        del self._ranks[key]

    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        return self._ranking.first(keep)
