"""LRU eviction policy: evict the least recently used block."""

from collections import OrderedDict
from collections.abc import Container

from twofold.kvcache.eviction.base import EvictionPolicy
from twofold.request import BlockKey


class Lru(EvictionPolicy):
    """Evicts the least recently used block."""

    help = "least recently used"

    def __init__(self) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()  # by last use: stored, hit or released

    def stored(self, key: BlockKey, position: int) -> None:
        self._order[key] = None

    def hit(self, key: BlockKey) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def hold(self, key: BlockKey) -> None:
        del self._order[key]

    def release(self, key: BlockKey) -> None:
        self._order[key] = None

    def forget(self, key: BlockKey) -> None:
        self._order.pop(key, None)

    def first(self, keep: Container[BlockKey] = ()) -> BlockKey | None:
        for key in self._order:
            if key not in keep:
                return key
        return None
