"""Several memories of one host as one cache: what goes from one goes down to the next, what is used comes up."""

from collections.abc import Container, Sequence

from mypy_extensions import mypyc_attr

from twofold.kvcache.cache import PrefixCache, RemovalReason
from twofold.request import BlockKey


@mypyc_attr(allow_interpreted_subclasses=True)
class TieredCache:
    """Tiers of blocks, the fastest first: host memory and disk, say. A block is in one of them at a time.

    A new block is stored in the first tier. One that has to go from a tier goes to the next; from the last it is gone.
    One that is hit comes up to the first. Hits, misses and removals are counted by each tier. Book-keeping only:
    whoever moves bytes listens to the tiers' watchers.
    """

    def __init__(self, tiers: Sequence[PrefixCache]) -> None:
        if not tiers:
            raise ValueError("a tiered cache has at least one tier")
        self.tiers = tuple(tiers)
        self._first = tiers[0]

    def __len__(self) -> int:
        return sum(len(tier) for tier in self.tiers)

    def __contains__(self, key: BlockKey) -> bool:
        return self.tier_of(key) is not None

    @property
    def capacity(self) -> int:
        return sum(tier.capacity for tier in self.tiers)

    def tier_of(self, key: BlockKey) -> int | None:
        """In which tier a block can be read."""
        for index, tier in enumerate(self.tiers):
            if key in tier:
                return index
        return None

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """How many of the leading blocks of a prompt each tier has: their sum can be reused. Changes nothing."""
        counts = [0] * len(self.tiers)
        counts[0] = self._first.match(keys)
        for position in range(counts[0], len(keys)):
            tier = self.tier_of(keys[position])
            if tier is None:
                break
            counts[tier] += 1
        return counts

    def touch(self, keys: Sequence[BlockKey], count: int, now: float) -> list[BlockKey]:
        """A request uses the first `count` blocks of its prompt, which are here: they come up to the first tier.

        Returns what went from the last tier to make room for them, in order. A block that is held stays where it is.
        """
        self.expire(now)
        gone: list[BlockKey] = []
        for position in range(count):
            key = keys[position]
            tier = self._tier(key)
            tier.hits += 1
            self._use(tier, key, (), gone)
        return gone

    def insert(self, keys: Sequence[BlockKey], now: float, start: int = 0) -> list[BlockKey]:
        """Store the blocks of a prompt from the `start`-th on; returns what went from the last tier, in order.

        Those that are here already come up, and are not counted. No block of the prompt itself goes: what finds no room
        anywhere else is not stored, and is among those returned.
        """
        self.expire(now)
        gone: list[BlockKey] = []
        own = frozenset(keys)
        for position in range(start, len(keys)):
            key = keys[position]
            tier = self.tier_of(key)
            if tier is not None:
                self._use(self.tiers[tier], key, own, gone)
            elif not any(each.knows(key) for each in self.tiers):
                self._first.misses += 1
                self._store(0, key, position, own, gone)
        return gone

    def hold(self, key: BlockKey) -> None:
        """A block that is here stays in its tier until it is released as often as it was held."""
        self._tier(key).hold(key)

    def release(self, key: BlockKey) -> None:
        """One of those that held a block does not any more."""
        for tier in self.tiers:
            if tier.held(key):
                tier.release(key)
                return
        raise KeyError(key)

    def pin(self, keys: Sequence[BlockKey], until: float) -> int:
        """Keep the leading blocks of a prompt in their tiers until a time; returns how many could be pinned."""
        for position, key in enumerate(keys):
            tier = self.tier_of(key)
            if tier is None or not self.tiers[tier].pin((key,), until):
                return position
        return len(keys)

    def expire(self, now: float) -> None:
        """Blocks may go whose pin was until `now` or before."""
        for tier in self.tiers:
            tier.expire(now)

    def _tier(self, key: BlockKey) -> PrefixCache:
        index = self.tier_of(key)
        if index is None:
            raise KeyError(key)
        return self.tiers[index]

    def _use(self, tier: PrefixCache, key: BlockKey, keep: Container[BlockKey], gone: list[BlockKey]) -> None:
        """A block of a tier is used, and comes up."""
        tier.use(key)
        if tier is not self._first and not tier.held(key) and self._first.has_room:
            position = tier.position(key)
            tier.remove(key, RemovalReason.MOVED)
            self._store(0, key, position, keep, gone)

    def _store(
        self,
        index: int,
        key: BlockKey,
        position: int,
        keep: Container[BlockKey],
        gone: list[BlockKey],
    ) -> None:
        """Into the tier of this index, or the next below that can make room for it."""
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
