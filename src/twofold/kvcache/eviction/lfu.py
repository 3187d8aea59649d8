"""Least frequently used."""

from collections.abc import Container

from twofold.kvcache.eviction.base import EvictionPolicy, Ranking
from twofold.request import BlockKey


class Lfu(EvictionPolicy):
    """The block goes first that was used least often since it was stored, which counts as its first use.

    Of several the one that has had that count longest. A count ends with the block's stay: one that comes back
    begins at one.
    """

    def __init__(self) -> None:
        self._uses: dict[BlockKey, int] = {}
        self._ranking = Ranking()

    def stored(self, key: BlockKey, position: int) -> None:  # noqa: ARG002  (where it stood does not matter)
        self._uses[key] = 1
        self._ranking.put(key, 1)

    def hit(self, key: BlockKey) -> None:
        uses = self._uses[key] = self._uses[key] + 1
        if key in self._ranking:
            self._ranking.drop(key)
            self._ranking.put(key, uses)

    def hold(self, key: BlockKey) -> None:
        self._ranking.drop(key)

    def release(self, key: BlockKey) -> None:
        self._ranking.put(key, self._uses[key])

    def forget(self, key: BlockKey) -> None:
        self._ranking.drop(key)
        del self._uses[key]

    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        return self._ranking.first(keep)
