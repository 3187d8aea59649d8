"""Prefix cache over several memory tiers of one host, the fastest tier first."""

from collections.abc import Container, Sequence

from mypy_extensions import mypyc_attr

from twofold.kvcache.cache import PrefixCache, RemovalReason
from twofold.request import BlockKey


@mypyc_attr(allow_interpreted_subclasses=True)
class TieredCache:
    """Prefix cache over tiers such as host memory and disk. Every block is in one tier at a time."""

    def __init__(self, tiers: Sequence[PrefixCache]) -> None:
        if not tiers:
            raise ValueError("a tiered cache needs at least one tier")
        # Each tier counts its own hits, misses and removals. Observers of the tiers move the data.
        self.tiers = tuple(tiers)
        self._first = tiers[0]

    def __contains__(self, key: BlockKey) -> bool:
        return self.tier_of(key) is not None

    def tier_of(self, key: BlockKey) -> int | None:
        """Return the index of the tier that contains a block, or None if it is not cached."""
        for index, tier in enumerate(self.tiers):
            if key in tier:
                return index
        return None

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Find the longest cached prefix of a prompt; return its blocks in each tier, the fastest tier first."""
        counts = [0] * len(self.tiers)
        counts[0] = self._first.match(keys)
        for position in range(counts[0], len(keys)):
            tier = self.tier_of(keys[position])
            if tier is None:  # the first block that is in no tier
                break
            counts[tier] += 1
        return counts

    def touch(self, keys: Sequence[BlockKey], count: int) -> list[BlockKey]:
        """Count blocks of a prompt as hits, and move them to the first tier. Return the blocks that left the cache."""
        gone: list[BlockKey] = []
        for position in range(count):
            key = keys[position]
            tier = self._tier(key)
            tier.hits += 1
            self._use(tier, key, (), gone)
        return gone

    def insert(self, keys: Sequence[BlockKey], start: int = 0) -> list[BlockKey]:
        """Store the blocks of a prompt from index `start` on, and return the blocks that left the cache."""
        gone: list[BlockKey] = []
        own = frozenset(keys)  # no block of the prompt is evicted to store another one
        for position in range(start, len(keys)):
            key = keys[position]
            tier = self.tier_of(key)
            if tier is not None:
                self._use(self.tiers[tier], key, own, gone)
            else:
                self._first.misses += 1
                self._store(0, key, position, own, gone)
        return gone

    def hold(self, key: BlockKey) -> None:
        """Keep a cached block in its tier until a matching `release`."""
        self._tier(key).hold(key)

    def release(self, key: BlockKey) -> None:
        """Undo one `hold` of a block."""
        self._tier(key).release(key)

    def _tier(self, key: BlockKey) -> PrefixCache:
        index = self.tier_of(key)
        if index is None:
            raise KeyError(key)
        return self.tiers[index]

    def _use(self, tier: PrefixCache, key: BlockKey, keep: Container[BlockKey], gone: list[BlockKey]) -> None:
        """Report to the eviction policy that a block was used, and move the block to the fastest tier if possible."""
        tier.use(key)
        if tier is not self._first and not tier.held(key) and self._first.has_room:
            position = tier.position(key)
            tier.remove(key, RemovalReason.MOVED)
            self._store(0, key, position, keep, gone)

    def _store(self, index: int, key: BlockKey, position: int, keep: Container[BlockKey], gone: list[BlockKey]) -> None:
        """Store a block in tier `index`, or in the next tier with room."""
        if index == len(self.tiers):  # the block has left the cache
            gone.append(key)
            return
        tier = self.tiers[index]
        if len(tier) >= tier.capacity:
            victim = tier.evict(keep)
            if victim is None:
                self._store(index + 1, key, position, keep, gone)
                return
            self._store(index + 1, victim[0], victim[1], keep, gone)  # the evicted block moves to the next tier
        tier.put(key, position)
