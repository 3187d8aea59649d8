"""Block accounts that know each block of a paged KV cache by its number.

Engine memory with reuse: blocks that several requests hold, and blocks that outlive the request that filled them.

    allocate_prompt ──▶ owned ── publish ──▶ owned, with a key ── last owner gone ──▶ cached ── room wanted ──▶ free
                                                  ▲ another request with that prefix │
                                                  └──────────────────────────────────┘

How a worker drives it. When a prompt starts, `allocate_prompt` with its keys (`prefix.prefix_keys`, salted): the first
`PromptAllocation.tokens` tokens are in the cache and are not computed. If it names a `copy`, the engine copies
that block before
the prompt's next batch, and `copied` says so. When a batch has completed, `publish` with the keys of the blocks that
are full now. Everything else is as with any other block accounts.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush

from twofold.errors import OutOfBlocksError
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator
from twofold.kvcache.cache import CacheObserver, Pins, RemovalReason
from twofold.kvcache.eviction.base import EvictionPolicy
from twofold.request import BlockKey


class PagedBlockAllocator(BlockAllocator):
    """`BlockAllocator` for a live worker: hands out the blocks 0 … num_blocks − 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        # A heap: the lowest ids go first, so that blocks of a request are neighbours as often as can be (engines and
        # transports are faster on runs), and equal sets of free blocks give equal allocations.
        self._free_ids = list(range(num_blocks))
        self._held: dict[BlockAllocation, list[int]] = {}

    def blocks_of(self, grant: BlockAllocation) -> Sequence[int]:
        return self._held[grant]

    def _give(self, grant: BlockAllocation, blocks: int) -> None:
        self._held.setdefault(grant, []).extend(heappop(self._free_ids) for _ in range(blocks))

    def _take_back(self, grant: BlockAllocation) -> None:
        for block in self._held.pop(grant):
            heappush(self._free_ids, block)


class PromptAllocation:
    """What a prompt was given: its blocks, and how many of its leading tokens are in them already.

    `copy` (source, target) asks for the contents of one block in another before anything is computed: the prompt is
    cached to its end, its last token has to be computed again, and the block it is in is somebody else's too.
    """

    __slots__ = ("copy", "grant", "tokens")

    def __init__(self, grant: BlockAllocation, tokens: int, copy: tuple[int, int] | None) -> None:
        self.grant = grant
        self.tokens = tokens
        self.copy = copy


class PrefixBlockAllocator(PagedBlockAllocator):
    """`PagedBlockAllocator` whose full prompt blocks are found again by key.

    A block with a key is never written: whoever is given it as part of a prefix only reads it. It stays when its last
    owner is done, and counts as free: it goes, by the eviction rule, when its room is wanted; one that is pinned
    goes only when no other can, and at most half of all can be pinned, unless `max_pinned` says otherwise. `hits` and
    `misses` count the full blocks of prompts, `removals` the keys that went, by reason. A block in several grants that
    are in transfer counts as in flight for each.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        eviction: EvictionPolicy,
        watcher: CacheObserver | None = None,
        max_pinned: int | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.max_pinned = num_blocks // 2 if max_pinned is None else max_pinned
        self.hits = 0
        self.misses = 0
        self.removals = dict.fromkeys(RemovalReason, 0)
        self._eviction = eviction
        self._watcher = watcher
        self._cached: dict[BlockKey, int] = {}  # the block of each key
        self._keys: dict[int, BlockKey] = {}  # and back
        self._owners = [
            0
        ] * num_blocks  # grants that have the block, and copies from it that are still to be made
        self._copies: dict[BlockAllocation, int] = {}  # the block that is still to be copied from
        self._pins = Pins()

    @property
    def num_cached(self) -> int:
        """How many blocks have a key, owned or not."""
        return len(self._cached)

    @property
    def num_pinned(self) -> int:
        """How many of them are pinned."""
        return len(self._pins)

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of a prompt are here. Changes nothing."""
        count = 0
        for key in keys:
            if key not in self._cached:
                break
            count += 1
        return count

    def allocate_prompt(
        self, owner: str, tokens: int, keys: Sequence[BlockKey], prompt_tokens: int
    ) -> PromptAllocation:
        """Give an owner blocks for `tokens` tokens, of which the first `prompt_tokens` are its prompt.

        `keys` are those of the prompt's full blocks. The leading ones that are here are shared; the last token of the
        prompt is left to be computed in any case. Raises OutOfBlocksError and changes nothing if blocks lack; never
        takes more of the free blocks than `allocate` would.
        """
        matched = self.match(keys[: prompt_tokens // self.block_size])
        whole = matched > 0 and matched * self.block_size == prompt_tokens
        prefix = [self._cached[key] for key in keys[: matched - whole]]
        total, taken = self.blocks_for(tokens), self._taken(tokens, prefix)
        if taken > self.num_free:
            raise OutOfBlocksError(f"{owner} needs {taken} blocks and {self.num_free} are free")
        self.num_free -= taken
        self.hits += matched
        self.misses += prompt_tokens // self.block_size - matched
        for position, block in enumerate(prefix):
            self._join(block, keys[position])
        grant = BlockAllocation(owner, total)
        held = self._held[grant] = prefix
        copy = self._last_again(grant, keys[matched - 1]) if whole else None
        self._give(grant, total - len(held))
        return PromptAllocation(grant, matched * self.block_size - whole, copy)

    def borrow(self, owner: str, keys: Sequence[BlockKey]) -> tuple[BlockAllocation, int]:
        """Blocks for a prefix: for somebody who reads those that are here, or fills the others and publishes them.

        Returns them, to be released as any other, and how many leading ones are here. No request is counted to have
        found them. Raises OutOfBlocksError and changes nothing if blocks lack.
        """
        here = self.match(keys)
        prefix = [self._cached[key] for key in keys[:here]]
        taken = self._taken(len(keys) * self.block_size, prefix)
        if taken > self.num_free:
            raise OutOfBlocksError(f"{owner} needs {taken} blocks and {self.num_free} are free")
        self.num_free -= taken
        for position, block in enumerate(prefix):
            self._join(block, keys[position])
        grant = BlockAllocation(owner, len(keys))
        self._held[grant] = prefix
        self._give(grant, len(keys) - here)
        return grant, here

    def reusable(self, keys: Sequence[BlockKey], prompt_tokens: int) -> int:
        """How many leading tokens of a prompt `allocate_prompt` would find here now."""
        matched = self.match(keys[: prompt_tokens // self.block_size])
        return min(matched * self.block_size, prompt_tokens - 1)

    def wanted(self, tokens: int, keys: Sequence[BlockKey], prompt_tokens: int) -> int:
        """How many of the free blocks `allocate_prompt` would take now."""
        shared = self.reusable(keys, prompt_tokens) // self.block_size
        return self._taken(tokens, [self._cached[key] for key in keys[:shared]])

    def freed_by(self, grants: Sequence[BlockAllocation]) -> int:
        leaving = Counter(block for grant in grants for block in self._held[grant])
        return sum(self._owners[block] == owners for block, owners in leaving.items())

    def copied(self, grant: BlockAllocation) -> None:
        """The copy that a prompt asked for is made."""
        source = self._copies.pop(grant, None)
        if source is not None:
            self._leave(source)

    def publish(self, grant: BlockAllocation, keys: Sequence[BlockKey], start: int = 0) -> None:
        """The blocks of a grant up to the last of `keys` are full and written; they can be found from now on.

        `keys` are those of the whole prefix, of which the first `start` are known to have been published. A block
        whose key another block has already is left as it is: its owner's alone.
        """
        held = self._held[grant]
        if len(keys) > len(held):
            raise ValueError(f"{grant.owner} has {len(held)} blocks, and keys of {len(keys)} are published")
        for position in range(start, len(keys)):
            block, key = held[position], keys[position]
            if block in self._keys or key in self._cached:
                continue
            self._cached[key] = block
            self._keys[block] = key
            self._eviction.stored(key, position)
            self._eviction.hold(key)
            if self._watcher is not None:
                self._watcher.stored(key)

    def pin(self, keys: Sequence[BlockKey], until: float) -> int:
        """Keep the leading blocks of a prompt that are here until a time; returns how many, as far as may be pinned.

        They count as free all the same, so that nobody waits for room because of them.
        """
        count = self.match(keys)
        for position in range(count):
            key = keys[position]
            if key not in self._pins:
                if len(self._pins) >= self.max_pinned:
                    return position
                if not self._owners[self._cached[key]]:
                    self._eviction.hold(key)
            self._pins.pin(key, until)
        return count

    def expire(self, now: float) -> None:
        """Blocks are as others again whose pin was until `now` or before."""
        for key in self._pins.expired(now):
            self._unpinned(key)

    def _unpinned(self, key: BlockKey) -> None:
        if not self._owners[self._cached[key]]:
            self._eviction.release(key)

    def _taken(self, tokens: int, prefix: Sequence[int]) -> int:
        """How many free blocks go to an owner that is given these: cached ones that nobody owns are free as well."""
        return self.blocks_for(tokens) - sum(self._owners[block] > 0 for block in prefix)

    def _give(self, grant: BlockAllocation, blocks: int) -> None:
        held = self._held.setdefault(grant, [])
        for _ in range(blocks):
            held.append(self._take())

    def _free(self, grant: BlockAllocation) -> None:
        self.copied(grant)
        # The end of a prompt is of no use without its beginning: by most rules it goes first if it is released first.
        for block in reversed(self._held.pop(grant)):
            self._leave(block)

    def _take(self) -> int:
        """A block whose contents nobody wants, or that of the key that goes first."""
        block = heappop(self._free_ids) if self._free_ids else self._evict()
        self._owners[block] = 1
        return block

    def _evict(self) -> int:
        while (key := self._eviction.first()) is None:
            pinned = self._pins.first()
            if pinned is None:
                raise OutOfBlocksError(
                    "no block is free"
                )  # the accounts say otherwise, so this does not happen
            # A request comes before what is kept for others that may come.
            self._pins.drop(pinned)
            self._unpinned(pinned)
        return self._uncache(key, RemovalReason.CAPACITY)

    def _uncache(self, key: BlockKey, reason: RemovalReason) -> int:
        """Nobody finds this key any more; returns the block that had it."""
        block = self._cached.pop(key)
        del self._keys[block]
        self._pins.drop(key)
        self._eviction.forget(key)
        self.removals[reason] += 1
        if self._watcher is not None:
            self._watcher.removed(key, reason)
        return block

    def _join(self, block: int, key: BlockKey) -> None:
        """One owner more of a block that has a key."""
        self._eviction.hit(key)
        if not self._owners[block] and key not in self._pins:
            self._eviction.hold(key)
        self._owners[block] += 1

    def _leave(self, block: int) -> None:
        """One owner less."""
        self._owners[block] -= 1
        if not self._owners[block]:
            self.num_free += 1
            key = self._keys.get(block)
            if key is None:
                heappush(self._free_ids, block)
            elif key not in self._pins:
                self._eviction.release(key)

    def _last_again(self, grant: BlockAllocation, key: BlockKey) -> tuple[int, int] | None:
        """Give a grant a block that it may write with the contents of one that has a key; says if it is to be copied.

        A block that nobody owns is not copied but taken out of the cache, until its new owner publishes it.
        """
        source, held = self._cached[key], self._held[grant]
        if not self._owners[source]:
            self._uncache(key, RemovalReason.REWRITTEN)
            self._owners[source] = 1
            held.append(source)
            return None
        self._eviction.hit(key)
        self._owners[source] += 1
        self._copies[grant] = source
        target = self._take()
        held.append(target)
        return source, target
