"""Who wants to know which blocks a memory has: told of each as it comes and as it goes.

Until when blocks are pinned.

Which blocks one memory has, by key, and which of them goes when it is full.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush

from mypy_extensions import mypyc_attr

from twofold.kvcache.eviction.base import EvictionPolicy
from twofold.request import BlockKey


class RemovalReason(StrEnum):
    """Why a block is not in a memory any more."""

    CAPACITY = "capacity"  # its room was wanted
    MOVED = "moved"  # it is in another tier now
    DAMAGED = "damaged"  # its checksum is wrong
    DROPPED = "dropped"  # it was never completed, or somebody asked for it to go
    REWRITTEN = "rewritten"  # a request took it to write its last token again


@mypyc_attr(allow_interpreted_subclasses=True)
class CacheObserver(ABC):
    """Told in the order in which things happen. It must not change the memory that tells it."""

    @abstractmethod
    def stored(self, key: BlockKey) -> None:
        """A block can be read from now on."""
        ...

    @abstractmethod
    def removed(self, key: BlockKey, reason: RemovalReason) -> None:
        """A block that could be read cannot be any more; its room is given away only after this returns."""
        ...


class Pins:
    """Blocks that are kept until a time, each until the latest that it was pinned for."""

    def __init__(self) -> None:
        self._until: dict[BlockKey, float] = {}
        # (until, −number, block): of those that end together the last goes first, as the end of a prompt is of no use
        # without its beginning. A block that is pinned for longer, or dropped, leaves its old entry to be skipped; they
        # are swept out when they are most of it.
        self._ends: list[tuple[float, int, BlockKey]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._until

    def pin(self, key: BlockKey, until: float) -> None:
        before = self._until.get(key)
        if before is None or until > before:
            self._until[key] = until
            self._entries += 1
            heappush(self._ends, (until, -self._entries, key))
            if len(self._ends) > 2 * len(self._until) + 16:
                self._ends = [end for end in self._ends if self._until.get(end[2]) == end[0]]
                heapify(self._ends)

    def first(self) -> BlockKey | None:
        """The block whose time is up first; None when none is pinned."""
        ends = self._ends
        while ends:
            until, _, key = ends[0]
            if self._until.get(key) == until:
                return key
            heappop(ends)
        return None

    def drop(self, key: BlockKey) -> bool:
        """The block is not pinned any more; False if it was not."""
        return self._until.pop(key, None) is not None

    def expired(self, now: float) -> list[BlockKey]:
        """The blocks whose time is up, which are not pinned any more."""
        ends, over = self._ends, []
        while ends and ends[0][0] <= now:
            until, _, key = heappop(ends)
            if self._until.get(key) == until:
                del self._until[key]
                over.append(key)
        return over


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache:
    """The blocks of one memory, at most `capacity` of them; book-keeping only.

    Keys are those of a prompt's blocks, in order: equal keys mean an equal block after an equal prefix. Times are
    seconds on the caller's clock. A block that is held stays; so does one that is pinned, until its time is up. A
    `partial` one takes room and is not found yet. `hits` counts blocks that requests found and used, `misses` those
    that they had to compute, `removals` what went, by reason. At most half of the memory can be pinned, unless
    `max_pinned` says otherwise.
    """

    def __init__(
        self,
        capacity: int,
        eviction: EvictionPolicy,
        watcher: CacheObserver | None = None,
        max_pinned: int | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError("a prefix cache has room for at least one block")
        self.capacity = capacity
        self.max_pinned = capacity // 2 if max_pinned is None else max_pinned
        self.hits = 0
        self.misses = 0
        self.removals = dict.fromkeys(RemovalReason, 0)
        self._eviction = eviction
        self._watcher = watcher
        self._positions: dict[BlockKey, int] = {}
        self._hidden: set[BlockKey] = set()  # partial, or to go when nobody holds them
        self._holds: dict[BlockKey, int] = {}
        self._leaving: dict[BlockKey, RemovalReason] = {}
        self._pins = Pins()

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the block can be read here."""
        return key in self._positions and key not in self._hidden

    @property
    def pinned(self) -> int:
        """How many blocks are pinned."""
        return len(self._pins)

    @property
    def has_room(self) -> bool:
        """Whether one block more could be stored, if another may have to go for it."""
        return len(self._positions) < self.capacity or self._eviction.first() is not None

    # -- prompts ----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a prompt can be read here. Changes nothing."""
        positions, hidden, count = self._positions, self._hidden, 0
        for key in keys:
            if key not in positions or key in hidden:
                break
            count += 1
        return count

    def touch(self, keys: Sequence[BlockKey], count: int, now: float) -> None:
        """A request uses the first `count` blocks of its prompt, which are here."""
        if len(self._pins):
            self.expire(now)
        eviction = self._eviction
        for position in range(count):
            eviction.hit(keys[position])
        self.hits += count

    def insert(self, keys: Sequence[BlockKey], now: float, start: int = 0) -> list[BlockKey]:
        """Store the blocks of a prompt from the `start`-th on; returns those that had to go for them, in order.

        Those that are here already are used once more. No block of the prompt itself goes: where all that is left is
        held, or its own, the rest is not stored.
        """
        if len(self._pins):
            self.expire(now)
        evicted: list[BlockKey] = []
        positions, eviction = self._positions, self._eviction
        own: frozenset[BlockKey] = (
            frozenset() if len(positions) + len(keys) <= self.capacity else frozenset(keys)
        )
        for position in range(start, len(keys)):
            key = keys[position]
            if key in positions:
                eviction.hit(key)
                continue
            self.misses += 1
            if len(positions) >= self.capacity:
                victim = eviction.first(own)
                if victim is None:
                    continue
                self._discard(victim, RemovalReason.CAPACITY)
                evicted.append(victim)
            self.put(key, position)
        return evicted

    # -- single blocks ----------------------------------------------------------------------------------------

    def put(self, key: BlockKey, position: int, *, partial: bool = False) -> None:
        """Store a block that is not here, where there is room; one that is `partial` is held until `complete`."""
        self._positions[key] = position
        self._eviction.stored(key, position)
        if partial:
            self._hidden.add(key)
            self.hold(key)
        elif self._watcher is not None:
            self._watcher.stored(key)

    def complete(self, key: BlockKey) -> None:
        """All of a partial block is written: it can be read."""
        if key not in self._leaving:
            self._hidden.remove(key)
            if self._watcher is not None:
                self._watcher.stored(key)
        self.release(key)

    def evict(self, keep: Container[BlockKey] = ()) -> tuple[BlockKey, int] | None:
        """Make the block go that goes first of those not to be kept; returns it with its position.

        None when none may go.
        """
        victim = self._eviction.first(keep)
        if victim is None:
            return None
        position = self._positions[victim]
        self._discard(victim, RemovalReason.CAPACITY)
        return victim, position

    def use(self, key: BlockKey) -> None:
        """A request uses a block that is here; whether that is a hit, the caller counts."""
        self._eviction.hit(key)

    def position(self, key: BlockKey) -> int:
        """The index of a block in its prompt."""
        return self._positions[key]

    def remove(self, key: BlockKey, reason: RemovalReason) -> None:
        """A block that is here goes; while somebody holds it, it cannot be found and its room is not free."""
        if self._pins.drop(key):
            self.release(key)
        if key not in self._holds:
            self._discard(key, reason)
        elif key not in self._leaving:
            self._leaving[key] = reason
            self._hide(key, reason)

    def hold(self, key: BlockKey) -> None:
        """A block that is here stays until it is released as often as it was held."""
        holds = self._holds.get(key, 0)
        if not holds:
            self._eviction.hold(key)
        self._holds[key] = holds + 1

    def release(self, key: BlockKey) -> None:
        """One of those that held a block does not any more."""
        holds = self._holds[key]
        if holds > 1:
            self._holds[key] = holds - 1
            return
        del self._holds[key]
        reason = self._leaving.pop(key, None)
        if reason is None:
            self._eviction.release(key)
        else:
            self._forget(key, reason)

    def knows(self, key: BlockKey) -> bool:
        """Whether the block takes room here, even if it cannot be read."""
        return key in self._positions

    def held(self, key: BlockKey) -> bool:
        """Whether somebody holds a block, or it is pinned."""
        return key in self._holds

    # -- context caching --------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[BlockKey], until: float) -> int:
        """Keep the leading blocks of a prompt that are here until a time; returns how many, as far as may be pinned.

        What is pinned for longer already stays so.
        """
        count = self.match(keys)
        for position in range(count):
            key = keys[position]
            if key not in self._pins:
                if len(self._pins) >= self.max_pinned:
                    return position
                self.hold(key)
            self._pins.pin(key, until)
        return count

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Blocks that are pinned are not any more."""
        for key in keys:
            if self._pins.drop(key):
                self.release(key)

    def expire(self, now: float) -> None:
        """Blocks may go whose pin was until `now` or before. Storing and using blocks does so by itself."""
        for key in self._pins.expired(now):
            self.release(key)

    # -- removal ----------------------------------------------------------------------------------------------

    def _discard(self, key: BlockKey, reason: RemovalReason) -> None:
        """A block that nobody holds goes."""
        if self._watcher is not None and key not in self._hidden:
            self._watcher.removed(key, reason)
        self._forget(key, reason)

    def _hide(self, key: BlockKey, reason: RemovalReason) -> None:
        """Nobody finds a block from now on that somebody holds."""
        if key not in self._hidden:
            self._hidden.add(key)
            if self._watcher is not None:
                self._watcher.removed(key, reason)

    def _forget(self, key: BlockKey, reason: RemovalReason) -> None:
        """The room of a block is free."""
        self._hidden.discard(key)
        del self._positions[key]
        self._eviction.forget(key)
        self.removals[reason] += 1
