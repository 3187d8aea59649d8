"""Prefix cache over several memory tiers of one host, the fastest tier first."""

from collections.abc import Container, Sequence

from mypy_extensions import mypyc_attr

from twofold.kvcache.cache import PrefixCache, RemovalReason
from twofold.request import BlockKey


@mypyc_attr(allow_interpreted_subclasses=True)
class TieredCache:
    """Prefix cache over tiers such as host memory and disk. Every block is in one tier at a time.

    New and hit blocks move to the first tier. Evicted blocks move to the next tier or, from the last tier, leave the
    cache. Each tier counts its own hits, misses and removals. Observers of the tiers move the data.
    """

    def __init__(self, tiers: Sequence[PrefixCache]) -> None:
        if not tiers:
            raise ValueError("a tiered cache needs at least one tier")
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
        """Return how many leading blocks of a prompt each tier contains, up to the first block that is in no tier."""
        counts = [0] * len(self.tiers)
        counts[0] = self._first.match(keys)
        for position in range(counts[0], len(keys)):
            tier = self.tier_of(keys[position])
            if tier is None:
                break
            counts[tier] += 1
        return counts

    def touch(self, keys: Sequence[BlockKey], count: int) -> list[BlockKey]:
        """Count the first `count` blocks of a prompt as hits, and move them to the first tier unless they are held.

        All `count` blocks must be cached. Returns the blocks evicted from the last tier, in order.
        """
        gone: list[BlockKey] = []
        for position in range(count):
            key = keys[position]
            tier = self._tier(key)
            tier.hits += 1
            self._use(tier, key, (), gone)
        return gone

    def insert(self, keys: Sequence[BlockKey], start: int = 0) -> list[BlockKey]:
        """Store the blocks of a prompt from index `start` on in the first tier.

        Blocks moved from other tiers do not count as hits. No block of the prompt is evicted to store another one.
        Returns, in order, the blocks that left the cache and the blocks that fit in no tier.
        """
        gone: list[BlockKey] = []
        own = frozenset(keys)
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
        """Report a use of a block in `tier` to the eviction policy. If possible, move the block to the first tier."""
        tier.use(key)
        if tier is not self._first and not tier.held(key) and self._first.has_room:
            position = tier.position(key)
            tier.remove(key, RemovalReason.MOVED)
            self._store(0, key, position, keep, gone)

    def _store(self, index: int, key: BlockKey, position: int, keep: Container[BlockKey], gone: list[BlockKey]) -> None:
        """Store a block in tier `index` or, if this tier cannot make room, in the next tier that can.

        Each evicted block is stored in the next tier in the same way. Blocks in `keep` are not evicted. Blocks that
        leave the last tier are appended to `gone`.
        """
        if index == len(self.tiers):
            gone.append(key)
            return
        tier = self.tiers[index]
        if len(tier) >= tier.capacity:
            victim = tier.evict(keep)
            if victim is None:
                self._store(index + 1, key, position, keep, gone)
                return
            self._store(index + 1, victim[0], victim[1], keep, gone)
        tier.put(key, position)
