"""Prefix cache in one memory tier, with eviction and with blocks that are protected from eviction."""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush

from mypy_extensions import mypyc_attr

from twofold.kvcache.eviction.base import EvictionPolicy
from twofold.request import BlockKey


class RemovalReason(StrEnum):
    """Reasons for the removal of a block from a memory."""

    CAPACITY = "capacity"  # evicted to make room
    MOVED = "moved"  # now in another tier
    DAMAGED = "damaged"  # checksum mismatch
    DROPPED = "dropped"  # not written to its tier
    REWRITTEN = "rewritten"  # taken by a request that computes its last token again


# Calls come in order. An observer must not change the memory.
@mypyc_attr(allow_interpreted_subclasses=True)
class CacheObserver(ABC):
    """Observer that is notified when a memory stores or removes a block."""

    @abstractmethod
    def stored(self, key: BlockKey) -> None:
        """Called when a block is in the cache and can be read."""

    @abstractmethod
    def removed(self, key: BlockKey, reason: RemovalReason) -> None:
        """Called when a block is removed. The observer must not read the block later."""


class CacheChanges(CacheObserver):
    """Blocks cached or evicted since the last call of `take`."""

    def __init__(self) -> None:
        self._changes: dict[BlockKey, bool] = {}  # True: cached, False: evicted

    def stored(self, key: BlockKey) -> None:
        self._add(key, stored=True)

    def removed(self, key: BlockKey, reason: RemovalReason) -> None:
        self._add(key, stored=False)

    def take(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return the keys of blocks cached since the last call, and the keys of blocks evicted since the last call."""
        changes, self._changes = self._changes, {}
        stored = [key for key, there in changes.items() if there]
        return stored, [key for key, there in changes.items() if not there]

    def _add(self, key: BlockKey, *, stored: bool) -> None:
        # A block is cached and evicted alternately, so a second change cancels the first.
        if self._changes.pop(key, None) is None:
            self._changes[key] = stored


class PinnedBlocks:
    """Pinned blocks with their expiry times."""

    def __init__(self) -> None:
        self._until: dict[BlockKey, float] = {}
        # (until, −number, key). Of pins with equal expiry the last one expires first, because the end of a prompt is
        # useless without its beginning. Outdated entries are skipped, and removed once they are the majority.
        self._expiries: list[tuple[float, int, BlockKey]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._until

    def pin(self, key: BlockKey, until: float) -> None:
        before = self._until.get(key)
        if before is None or until > before:  # the later expiry time applies
            self._until[key] = until
            self._entries += 1
            heappush(self._expiries, (until, -self._entries, key))
            if len(self._expiries) > 2 * len(self._until) + 16:
                self._expiries = [entry for entry in self._expiries if self._until.get(entry[2]) == entry[0]]
                heapify(self._expiries)

    def pop(self) -> BlockKey | None:
        """Unpin the next block to expire and return its key, or None if no block is pinned."""
        while self._expiries:
            until, _, key = heappop(self._expiries)
            if self._until.get(key) == until:
                del self._until[key]
                return key
        return None

    def drop(self, key: BlockKey) -> bool:
        """Unpin a block. Return False if it was not pinned."""
        return self._until.pop(key, None) is not None

    def expire(self, now: float) -> list[BlockKey]:
        """Unpin the blocks whose expiry time is `now` or earlier, and return their keys."""
        expiries, expired = self._expiries, []
        while expiries and expiries[0][0] <= now:
            until, _, key = heappop(expiries)
            if self._until.get(key) == until:
                del self._until[key]
                expired.append(key)
        return expired


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache:
    """Prefix cache of up to `capacity` blocks in one memory. It only does bookkeeping and moves no data."""

    def __init__(
        self,
        capacity: int,
        eviction: EvictionPolicy,
        observer: CacheObserver | None = None,
        max_pinned: int | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError("a prefix cache needs room for at least one block")
        self.capacity = capacity
        self.max_pinned = capacity // 2 if max_pinned is None else max_pinned
        self.hits = 0  # blocks that requests reused
        self.misses = 0  # blocks that requests computed
        self.removals = dict.fromkeys(RemovalReason, 0)
        self._eviction = eviction
        self._observer = observer
        self._positions: dict[BlockKey, int] = {}
        # Held blocks (until `release`) and pinned blocks (until a time) are never evicted.
        self._holds: dict[BlockKey, int] = {}
        self._pins = PinnedBlocks()

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._positions

    @property
    def pinned(self) -> int:
        """Number of pinned blocks."""
        return len(self._pins)

    @property
    def has_room(self) -> bool:
        """Whether one more block can be stored, if necessary by evicting another block."""
        return len(self._positions) < self.capacity or self._eviction.first() is not None

    def match(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of leading blocks of a prompt that are cached."""
        positions, count = self._positions, 0
        for key in keys:
            if key not in positions:
                break
            count += 1
        return count

    def touch(self, keys: Sequence[BlockKey], count: int) -> None:
        """Record a cache hit for each of the first `count` blocks of a prompt. These blocks must be cached."""
        eviction = self._eviction
        for position in range(count):
            eviction.hit(keys[position])
        self.hits += count

    def insert(self, keys: Sequence[BlockKey], start: int = 0) -> list[BlockKey]:
        """Store the blocks of a prompt from index `start` on, and return the evicted blocks."""
        evicted: list[BlockKey] = []
        positions, eviction = self._positions, self._eviction
        own: frozenset[BlockKey] = frozenset() if len(positions) + len(keys) <= self.capacity else frozenset(keys)
        for position in range(start, len(keys)):
            key = keys[position]
            if key in positions:  # does not count in `hits`
                eviction.hit(key)
                continue
            self.misses += 1
            if len(positions) >= self.capacity:
                victim = eviction.first(own)
                if victim is None:  # only blocks of the prompt could be evicted: do not store this one
                    continue
                self._discard(victim, RemovalReason.CAPACITY)
                evicted.append(victim)
            self.put(key, position)
        return evicted

    def put(self, key: BlockKey, position: int) -> None:
        """Store the new block `key`. `position` is the number of preceding blocks in the prompt."""
        # The caller ensures that there is room.
        self._positions[key] = position
        self._eviction.stored(key, position)
        if self._observer is not None:
            self._observer.stored(key)

    def use(self, key: BlockKey) -> None:
        """Report a use of a block to the eviction policy, without counting a hit."""
        self._eviction.hit(key)

    def position(self, key: BlockKey) -> int:
        """Return the index of a cached block in its prompt."""
        return self._positions[key]

    def evict(self, keep: Container[BlockKey] = ()) -> tuple[BlockKey, int] | None:
        """Evict a cached block that is not in `keep`. Return its key and its index in the prompt, or None."""
        victim = self._eviction.first(keep)
        if victim is None:
            return None
        position = self._positions[victim]
        self._discard(victim, RemovalReason.CAPACITY)
        return victim, position

    def remove(self, key: BlockKey, reason: RemovalReason) -> None:
        """Remove a cached block, even if it is pinned. Raises ValueError if the block is held by a request."""
        if self._pins.drop(key):
            self.release(key)
        if key in self._holds:
            raise ValueError("a held block cannot be removed")
        self._discard(key, reason)

    def hold(self, key: BlockKey) -> None:
        """Protect a cached block from eviction until the matching call of `release`."""
        holds = self._holds.get(key, 0)
        if not holds:
            self._eviction.hold(key)
        self._holds[key] = holds + 1

    def release(self, key: BlockKey) -> None:
        """Undo one call of `hold` for a block."""
        holds = self._holds[key]
        if holds > 1:
            self._holds[key] = holds - 1
            return
        del self._holds[key]
        self._eviction.release(key)

    def held(self, key: BlockKey) -> bool:
        """Whether a request or a pin keeps this block from eviction."""
        return key in self._holds

    def pin(self, keys: Sequence[BlockKey], until: float) -> int:
        """Pin the cached leading blocks of a prompt until time `until`, and return their number."""
        count = self.match(keys)
        for position in range(count):
            key = keys[position]
            if key not in self._pins:
                if len(self._pins) >= self.max_pinned:  # the rest is not pinned
                    return position
                self.hold(key)
            self._pins.pin(key, until)
        return count

    def unpin_next(self) -> bool:
        """Unpin the block whose pin expires first. Return False if no block is pinned."""
        key = self._pins.pop()
        if key is not None:
            self.release(key)
        return key is not None

    def expire(self, now: float) -> None:
        """Unpin the blocks whose expiry time is `now` or earlier."""
        for key in self._pins.expire(now):
            self.release(key)

    def _discard(self, key: BlockKey, reason: RemovalReason) -> None:
        if self._observer is not None:
            self._observer.removed(key, reason)
        del self._positions[key]
        self._eviction.forget(key)
        self.removals[reason] += 1
