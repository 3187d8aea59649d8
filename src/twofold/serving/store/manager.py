"""Decides which KV blocks a store keeps in memory and on disk, and assigns memory slots (one block each) to requests,
first come, first served. It moves no data itself.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from twofold.kvcache.cache import CacheChanges, CacheObserver, PrefixCache, RemovalReason
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.slots import SlotAllocator
from twofold.kvcache.tiers import TieredCache
from twofold.request import BlockKey
from twofold.serving.store.messages import Block, DiskForget, DiskOperation, DiskRead, DiskSpare, DiskWrite

MEMORY, DISK = 0, 1
TIERS = ("memory", "disk")
# Counters of moved blocks: to clients, from clients, from disk, to disk, from other hosts, to other hosts.
COUNTERS = ("loaded", "stored", "disk_read", "disk_written", "peer_read", "peer_sent")

# A client and the number of its request.
Requester = tuple[str, int]
_DISK: Requester = ("", 0)


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """Memory slots that a KV store assigns to a request.

    If `puts` is true, the request writes KV blocks to the slots; if false, the request reads KV blocks from the
    slots. `blocks` maps the index of a block in the prompt to the block's slot.
    """

    requester: Requester
    puts: bool
    blocks: dict[int, Block]
    last: bool


@dataclass(slots=True, eq=False)
class _LoadRequest:
    requester: Requester
    length: int
    counter: str
    waits: dict[bytes, int] = field(default_factory=dict)  # blocks awaited from disk: index in the prompt by key


@dataclass(slots=True, eq=False)
class _PutRequest:
    requester: Requester
    keys: Sequence[bytes]
    next_index: int  # of the next block that needs a slot
    counter: str
    limit: int  # maximum number of leased slots
    leased: dict[int, int] = field(default_factory=dict)  # block index by slot


class StoreManager:
    """Manager of a KV store with `slots` blocks in memory and `disk_blocks` blocks on disk (0: no disk). One eighth of
    the slots is reserved for blocks that are being written.
    """

    def __init__(self, slots: int, disk_blocks: int, eviction: str) -> None:
        if slots < 2:
            raise ValueError("a store needs at least two slots: one to keep a block and one to fill")
        self._spare = max(1, slots // 8)  # slots for blocks that clients write, or that are on their way to disk
        self.slots = SlotAllocator(slots)
        sizes = [slots - self._spare, *([disk_blocks] if disk_blocks else [])]
        self.changes = CacheChanges()
        tiers = [PrefixCache(n, create_eviction(eviction), _Watcher(self, i)) for i, n in enumerate(sizes)]
        self.tiers = TieredCache(tiers)
        self._blocks: dict[bytes, Block] = {}  # blocks in memory
        self._leaving: dict[bytes, Block] = {}  # blocks just evicted from memory
        self._incoming: set[bytes] = set()  # blocks with leased slots
        self._reading: dict[bytes, set[_LoadRequest]] = {}  # pending disk reads, and the Loads that wait for them
        self._uncopied: deque[bytes] = deque(maxlen=slots)  # new blocks without a copy on disk
        self._writing = [0, 0]  # queued writes of evicted blocks, and of copies
        self._requests: dict[Requester, _LoadRequest | _PutRequest] = {}
        self._waiting: deque[bytes | _PutRequest] = deque()  # disk reads and Puts that wait for free slots
        self._moves: list[DiskOperation] = []
        self._grants: list[StoreGrant] = []
        self.moved = dict.fromkeys(COUNTERS, 0)

    # -- requests of clients --------------------------------------------------------------------------------

    def recover(self, key: bytes, position: int) -> None:
        """Add a block that an earlier store process has left on disk."""
        disk = self.tiers.tiers[DISK]
        if key not in disk and len(disk) < disk.capacity:
            disk.put(key, position)

    def lookup(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Count the leading blocks of a prompt that are in the store.

        Return two counts: the leading blocks in memory or on disk, and the leading blocks in memory alone.
        """
        return sum(self.tiers.match(keys)), self.tiers.tiers[MEMORY].match(keys)

    def incoming(self, key: bytes) -> bool:
        """Return whether this block is being written to the store."""
        return key in self._incoming

    def load(self, requester: Requester, keys: Sequence[bytes], counter: str = "loaded") -> None:
        """Start a Load request: pin the cached prefix of a prompt, after reading it from disk if necessary."""
        loading = _LoadRequest(requester, sum(self.tiers.match(keys)), counter)
        self._requests[requester] = loading
        ready: dict[int, Block] = {}
        for index, key in enumerate(keys[: loading.length]):
            block = self._blocks.get(key)
            if block is None:
                self._want(key, index, loading)
            else:
                self.tiers.touch((key,), 1)
                ready[index] = self._hold(block, loading)
        self._grant_load(loading, ready)
        self._advance()

    def put(
        self, requester: Requester, keys: Sequence[bytes], start: int, counter: str = "stored", limit: int | None = None
    ) -> None:
        """Start a Put request: lease slots for the missing blocks of a prompt, beginning with block `start`."""
        putting = _PutRequest(requester, keys, start, counter, self.slots.count if limit is None else limit)
        self._requests[requester] = putting
        self._waiting.append(putting)
        self._advance()

    def commit(self, requester: Requester, blocks: Sequence[Block]) -> None:
        """Make the written blocks of a Put request readable, and lease slots for the request's next blocks."""
        putting = self._requests.get(requester)
        if not isinstance(putting, _PutRequest):
            return
        whole = [block for block in blocks if block.slot in putting.leased]
        self._keep(putting, {putting.leased.pop(block.slot): block for block in whole})
        self._give_up(putting)
        if putting.next_index < len(putting.keys):
            self._waiting.append(putting)
        else:
            self._finish(putting)
        self._advance()

    def release(self, requester: Requester, slots: Sequence[int]) -> None:
        """Unpin slots of a Load request."""
        if isinstance(self._requests.get(requester), _LoadRequest):
            for slot in slots:
                if slot in self.slots.had_by(requester):
                    self.slots.release(slot, requester)
            self._advance()

    def end(self, requester: Requester) -> None:
        """End a Load or Put request, and release its slots."""
        request = self._requests.pop(requester, None)
        if isinstance(request, _LoadRequest):
            for key in request.waits:
                self._reading[key].discard(request)
        elif isinstance(request, _PutRequest):
            self._incoming.difference_update(request.keys[index] for index in request.leased.values())
            if request in self._waiting:
                self._waiting.remove(request)
        self.slots.lose(requester)
        self._advance()

    def lose(self, client: str) -> None:
        """End all requests of a dead client."""
        for requester in [requester for requester in self._requests if requester[0] == client]:
            self.end(requester)

    # -- results of disk operations -------------------------------------------------------------------------

    def written(self, move: DiskWrite, *, done: bool) -> None:
        """Process the end of a disk write; `done` is whether it succeeded."""
        self._writing[move.spare] -= 1
        self.moved["disk_written"] += done
        self.slots.release(move.slot, _DISK)
        if not done and not move.spare:
            self._lose_from_disk(move.key, RemovalReason.DROPPED)
        self._copy_behind()
        self._advance()

    def was_read(self, move: DiskRead, checksum: int | None) -> None:
        """Process the end of a disk read; `checksum` is None if the read failed."""
        waiting = self._reading.pop(move.key)
        if checksum is None:
            self.slots.give_up(move.slot, _DISK)
            self._lose_from_disk(move.key, RemovalReason.DAMAGED)
            for loading in waiting:
                self._cut(loading, move.key)
        else:
            block = Block(move.slot, checksum)
            self.moved["disk_read"] += 1
            self.slots.commit(move.slot, _DISK)
            for loading in waiting:
                self._grant_load(loading, {loading.waits.pop(move.key): self._hold(block, loading)})
            if move.key in self._blocks or move.key not in self.tiers:
                self.slots.drop(move.slot)  # removed from disk meanwhile, or stored again
            else:
                self._blocks[move.key] = block
                self.tiers.touch((move.key,), 1)
                self._settle([move.key])
        self._advance()

    # -- pending work ---------------------------------------------------------------------------------------

    def take_moves(self) -> list[DiskOperation]:
        """Return the disk operations that were queued since the last call, in order."""
        moves, self._moves = self._moves, []
        return moves

    def take_grants(self) -> list[StoreGrant]:
        """Return the assignments of slots to requests since the last call."""
        granted, self._grants = self._grants, []
        return granted

    # -- slots ----------------------------------------------------------------------------------------------

    def _want(self, key: bytes, index: int, loading: _LoadRequest) -> None:
        loading.waits[key] = index
        if key not in self._reading:
            self._reading[key] = set()
            self._waiting.append(key)
        self._reading[key].add(loading)

    def _advance(self) -> None:
        while self._waiting and self.slots.num_free:
            first = self._waiting.popleft()
            if isinstance(first, _PutRequest):
                self._lease(first)
            elif not self._reading[first]:
                del self._reading[first]  # the Loads that wanted the block have ended
            else:
                self._moves.append(DiskRead(first, self.slots.lease(_DISK)))

    def _lease(self, putting: _PutRequest) -> None:
        # At most half of the free slots, so that other requests get slots too.
        limit = min(putting.limit, max(1, self.slots.num_free // 2))
        while putting.next_index < len(putting.keys) and len(putting.leased) < limit and self.slots.num_free:
            key = putting.keys[putting.next_index]
            if key not in self.tiers and key not in self._incoming:
                putting.leased[self.slots.lease(putting.requester)] = putting.next_index
                self._incoming.add(key)
            putting.next_index += 1
        if putting.leased:
            blocks = {index: Block(slot, 0) for slot, index in putting.leased.items()}
            self._grants.append(StoreGrant(putting.requester, True, blocks, False))
        else:
            self._finish(putting)

    def _finish(self, putting: _PutRequest) -> None:
        del self._requests[putting.requester]
        self._grants.append(StoreGrant(putting.requester, True, {}, True))

    def _give_up(self, putting: _PutRequest) -> None:
        for slot, index in putting.leased.items():
            self.slots.give_up(slot, putting.requester)
            self._incoming.remove(putting.keys[index])
        putting.leased.clear()

    def _keep(self, putting: _PutRequest, whole: dict[int, Block]) -> None:
        keys = putting.keys
        for index, block in whole.items():
            self._incoming.remove(keys[index])
            self.slots.commit(block.slot, putting.requester)
            self._blocks[keys[index]] = block
        self.moved[putting.counter] += len(whole)
        for first, end in _runs(sorted(whole)):
            self.tiers.insert(keys[:end], first)
        self._settle([keys[index] for index in whole])
        if len(self.tiers.tiers) > 1:
            self._uncopied.extend(keys[index] for index in sorted(whole))
            self._copy_behind()

    def _copy_behind(self) -> None:
        # Copied blocks survive a restart, and their eviction needs no write.
        memory = self.tiers.tiers[MEMORY]
        while self._uncopied:
            key = self._uncopied[0]
            block = self._blocks.get(key)
            if block is not None and not self._write(key, memory.position(key), block, spare=True):
                return
            self._uncopied.popleft()

    def _hold(self, block: Block, loading: _LoadRequest) -> Block:
        self.moved[loading.counter] += 1
        self.slots.hold(block.slot, loading.requester)
        return block

    def _grant_load(self, loading: _LoadRequest, ready: dict[int, Block]) -> None:
        last = not loading.waits
        if ready or last:
            self._grants.append(StoreGrant(loading.requester, False, ready, last))

    def _cut(self, loading: _LoadRequest, key: bytes) -> None:
        loading.length = loading.waits[key]  # blocks after an unavailable one are useless
        for other in [other for other, index in loading.waits.items() if index >= loading.length]:
            del loading.waits[other]
            if other in self._reading:
                self._reading[other].discard(loading)
        self._grant_load(loading, {})

    # -- tiers ----------------------------------------------------------------------------------------------

    def removed(self, tier: int, key: bytes, reason: RemovalReason) -> None:
        """Record that memory or disk (`tier`) has removed a block."""
        self.changes.removed(key, reason)
        if tier == MEMORY:
            self._leaving[key] = self._blocks.pop(key)
        else:
            self._moves.append((DiskSpare if reason is RemovalReason.MOVED else DiskForget)(key))

    def _settle(self, added: Sequence[bytes]) -> None:
        for key in added:
            if key in self._blocks and key not in self.tiers.tiers[MEMORY]:
                self._leaving[key] = self._blocks.pop(key)  # memory had no room for the block
        # Blocks evicted to make room are written to disk, and their slots become free.
        leaving, self._leaving = self._leaving, {}
        disk = self.tiers.tiers[DISK] if len(self.tiers.tiers) > 1 else None
        for left, block in leaving.items():
            if disk is not None and left in disk and not self._write(left, disk.position(left), block, spare=False):
                disk.remove(left, RemovalReason.DROPPED)
            self.slots.drop(block.slot)

    def _write(self, key: bytes, position: int, block: Block, *, spare: bool) -> bool:
        keeps_up = self._writing[spare] < self._spare  # not too many writes are queued
        if keeps_up:
            self._writing[spare] += 1
            self.slots.hold(block.slot, _DISK)
            self._moves.append(DiskWrite(key, position, block.slot, block.checksum, spare))
        return keeps_up

    def _lose_from_disk(self, key: bytes, reason: RemovalReason) -> None:
        if key in self.tiers.tiers[DISK]:
            self.tiers.tiers[DISK].remove(key, reason)


class _Watcher(CacheObserver):
    def __init__(self, manager: StoreManager, tier: int) -> None:
        self._manager, self._tier = manager, tier

    def stored(self, key: BlockKey) -> None:
        self._manager.changes.stored(key)

    def removed(self, key: BlockKey, reason: RemovalReason) -> None:
        assert isinstance(key, bytes)  # noqa: S101  (narrows the type: only traces have integer keys)
        self._manager.removed(self._tier, key, reason)


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Split sorted numbers into ranges of consecutive numbers: (first, last + 1)."""
    among = set(indices)
    starts = [index for index in indices if index - 1 not in among]
    ends = [index + 1 for index in indices if index + 1 not in among]
    return list(zip(starts, ends, strict=True))
