"""Block allocators of a live worker, which track block ids and share the blocks of common prompt prefixes."""

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from twofold.errors import OutOfBlocksError
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator
from twofold.kvcache.cache import PrefixCache, RemovalReason
from twofold.request import BlockKey


class PagedBlockAllocator(BlockAllocator):
    """Block allocator that tracks block ids."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        # A heap: allocations become runs of neighbouring blocks, which engines and transports copy faster, and equal
        # sets of free blocks give equal allocations.
        self._free_ids = list(range(num_blocks))
        self._tables: dict[BlockAllocation, list[int]] = {}

    def blocks_of(self, allocation: BlockAllocation) -> Sequence[int]:
        return self._tables[allocation]

    def _assign(self, allocation: BlockAllocation, blocks: int) -> None:
        table = self._tables.setdefault(allocation, [])
        table.extend(self._take() for _ in range(blocks))

    def _take(self) -> int:
        return heappop(self._free_ids)

    def _free(self, allocation: BlockAllocation) -> None:
        super()._free(allocation)
        for block in self._tables.pop(allocation):
            heappush(self._free_ids, block)


class PromptAllocation(NamedTuple):
    """Blocks of a prompt, and the number of its leading tokens whose KV is cached."""

    grant: BlockAllocation
    tokens: int  # leading tokens whose KV is cached
    # (source, target): the engine must copy block `source` to block `target` before it computes the prompt. This
    # happens if the whole prompt is cached and its last block is shared: the last token must be computed again, but
    # must not overwrite a shared block.
    copy: tuple[int, int] | None


#   allocate_prompt ──▶ owned ── publish ──▶ owned, with a key ── last owner gone ──▶ cached ── evicted ──▶ free
#                                                 ▲ another request with that prefix │
#                                                 └──────────────────────────────────┘
#
# When a prompt starts, call `allocate_prompt` with the keys of its full blocks. If `PromptAllocation.copy` is set, let
# the engine copy this block before the next batch with the prompt, and then call `copied`. After each batch, call
# `publish` with the keys of all blocks that are now full.
#
# A block with a key is read-only. A cached block counts as free. If no other block is free, the eviction policy chooses
# a cached block, and pinned blocks last. `num_in_flight` counts a block once for each allocation in transfer with it.
class PrefixBlockAllocator(PagedBlockAllocator):
    """Allocator of KV blocks with prefix caching."""

    def __init__(self, block_size: int, cache: PrefixCache) -> None:
        super().__init__(cache.capacity, block_size)
        self.cache = cache
        self._cached: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._owners = [0] * cache.capacity  # allocations that contain the block, and pending copies from it
        self._copies: dict[BlockAllocation, int] = {}  # source block of each pending copy

    def allocate_prompt(
        self, owner: str, tokens: int, keys: Sequence[BlockKey], prompt_tokens: int
    ) -> PromptAllocation:
        """Allocate blocks, and reuse cached blocks of the prompt. Raises OutOfBlocksError if too few are free."""
        # `keys` are those of the prompt's full blocks. The last prompt token is always computed.
        full, total = prompt_tokens // self.block_size, self.blocks_for(tokens)
        matched = self.cache.match(keys[:full])
        whole = matched > 0 and matched * self.block_size == prompt_tokens
        allocation = self._share(owner, keys[: matched - whole], total)
        self.cache.hits += matched
        self.cache.misses += full - matched
        copy = self._rewrite_last(allocation, keys[matched - 1]) if whole else None
        self._assign(allocation, total - len(self._tables[allocation]))
        return PromptAllocation(allocation, matched * self.block_size - whole, copy)

    def allocate_after(self, owner: str, tokens: int, keys: Sequence[BlockKey]) -> tuple[BlockAllocation, int]:
        # The caller reads the cached blocks, and fills and publishes the others. Hit counts do not change.
        cached, total = self.cache.match(keys), self.blocks_for(tokens)
        allocation = self._share(owner, keys[:cached], total)
        self._assign(allocation, total - cached)
        return allocation, cached

    def reusable_tokens(self, keys: Sequence[BlockKey], prompt_tokens: int) -> int:
        """Return how many leading tokens of a prompt need no computation."""
        matched = self.cache.match(keys[: prompt_tokens // self.block_size])
        return min(matched * self.block_size, prompt_tokens - 1)

    def blocks_taken(self, tokens: int, keys: Sequence[BlockKey], prompt_tokens: int) -> int:
        """Return how many free blocks `allocate_prompt` would take with the same arguments."""
        shared = self.reusable_tokens(keys, prompt_tokens) // self.block_size
        return self._taken(self.blocks_for(tokens), [self._cached[key] for key in keys[:shared]])

    def freed_by(self, allocations: Sequence[BlockAllocation]) -> int:
        leaving = Counter(block for allocation in allocations for block in self._tables[allocation])
        return sum(self._owners[block] == owners for block, owners in leaving.items())

    def copied(self, allocation: BlockAllocation) -> None:
        """Release the shared block of an allocation after the engine has copied it (copy-on-write)."""
        source = self._copies.pop(allocation, None)
        if source is not None:
            self._leave(source)

    def publish(self, allocation: BlockAllocation, keys: Sequence[BlockKey], start: int = 0) -> None:
        """Make the full blocks of an allocation available to other requests under `keys`."""
        table = self._tables[allocation]
        if len(keys) > len(table):
            raise ValueError(f"{allocation.owner} has {len(table)} blocks but publishes {len(keys)} keys")
        for position in range(start, len(keys)):
            self._publish(table[position], keys[position], position)

    def publish_block(self, allocation: BlockAllocation, key: BlockKey, position: int) -> None:
        """Make the full block at index `position` of an allocation available to other requests under `key`."""
        self._publish(self._tables[allocation][position], key, position)

    def _publish(self, block: int, key: BlockKey, position: int) -> None:
        if block in self._keys or key in self._cached:  # published before, or another block has the key
            return
        self._cached[key] = block
        self._keys[block] = key
        self.cache.put(key, position)
        self.cache.hold(key)

    def _share(self, owner: str, keys: Sequence[BlockKey], total: int) -> BlockAllocation:
        """Create an allocation of `total` blocks that shares the cached blocks with the keys `keys`.

        The other blocks are reserved, but not assigned yet. Raises OutOfBlocksError if too few blocks are free.
        """
        shared = [self._cached[key] for key in keys]
        taken = self._taken(total, shared)
        if taken > self.num_free:
            raise OutOfBlocksError(f"{owner} needs {taken} blocks and {self.num_free} are free")
        self.num_free -= taken
        for block, key in zip(shared, keys, strict=True):
            self.cache.use(key)
            if not self._owners[block]:
                self.cache.hold(key)
            self._owners[block] += 1
        allocation = BlockAllocation(owner, total)
        self._tables[allocation] = shared
        return allocation

    def _taken(self, total: int, shared: Sequence[int]) -> int:
        """Return the number of free blocks that an allocation of `total` blocks takes.

        The allocation takes no free block for a block in `shared` that another allocation already uses.
        """
        # Cached blocks without owners count as free.
        return total - sum(self._owners[block] > 0 for block in shared)

    def _take(self) -> int:
        if self._free_ids:
            block = heappop(self._free_ids)
        else:
            while (evicted := self.cache.evict()) is None:
                # A running request has precedence over a prefix that is pinned for later requests.
                if not self.cache.unpin_next():
                    raise OutOfBlocksError("no block is free")  # unreachable while num_free is right
            block = self._forget(evicted[0])
        self._owners[block] = 1
        return block

    def _forget(self, key: BlockKey) -> int:
        block = self._cached.pop(key)
        del self._keys[block]
        return block

    def _free(self, allocation: BlockAllocation) -> None:
        self.copied(allocation)
        # In reverse, so that most policies evict the end of a prompt first: it is useless without the beginning.
        for block in reversed(self._tables.pop(allocation)):
            self._leave(block)

    def _leave(self, block: int) -> None:
        """Remove one owner of a block. A block without owners is cached or free."""
        self._owners[block] -= 1
        if not self._owners[block]:
            self.num_free += 1
            key = self._keys.get(block)
            if key is None:
                heappush(self._free_ids, block)
            else:
                self.cache.release(key)

    def _rewrite_last(self, allocation: BlockAllocation, key: BlockKey) -> tuple[int, int] | None:
        """Append a cached block. Return the block ids (source, target) of a copy on write, or None without one."""
        source, table = self._cached[key], self._tables[allocation]
        if not self._owners[source]:  # the cached block itself becomes writable
            self.cache.remove(key, RemovalReason.REWRITTEN)
            self._forget(key)
            self._owners[source] = 1
            table.append(source)
            return None
        self.cache.use(key)
        self._owners[source] += 1
        self._copies[allocation] = source
        target = self._take()
        table.append(target)
        return source, target
