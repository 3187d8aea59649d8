"""What a store does on its disk, one thing after the other.

What a host's store decides: who may touch which slot, which blocks stay in memory, go to the disk and come back.

Book-keeping only. It says what is to be copied between memory and disk (`take_moves`), is told what came of it, and has
the answers to questions (`take_granted`) when there are slots for them, first come first served.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twofold.kvcache.cache import CacheObserver, PrefixCache, RemovalReason
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.slots import SlotAllocator
from twofold.kvcache.tiers import TieredCache
from twofold.request import BlockKey
from twofold.serving.store.messages import Block


class DiskWrite(NamedTuple):
    """Write what is in this slot of the memory, block `position` of its prompt, unless it is on the disk already.

    `spare`: as below.
    """

    key: bytes
    position: int
    slot: int
    checksum: int
    spare: bool


class DiskRead(NamedTuple):
    """Read a block into this slot of the memory."""

    key: bytes
    slot: int


class DiskSpare(NamedTuple):
    """The memory has this block too: on the disk it may stay as long as its room is not needed for another."""

    key: bytes


class DiskForget(NamedTuple):
    """A block is wanted no more."""

    key: bytes


DiskOperation = DiskWrite | DiskRead | DiskSpare | DiskForget


MEMORY, DISK = 0, 1
TIERS = ("memory", "disk")
# Ways that blocks go: given to clients, put by them, from the disk, to it, from the stores of other hosts, to those.
WAYS = ("loaded", "stored", "disk_read", "disk_written", "peer_read", "peer_sent")

# Who asks: a client, and the number of its question.
Requester = tuple[str, int]
_DISK: Requester = ("", 0)


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """Slots for some more blocks of a question, by their index in it; `last`: no more are to come."""

    asker: Requester
    puts: bool
    blocks: dict[int, Block]
    last: bool


@dataclass(slots=True, eq=False)
class _Loading:
    """A Load under way: `waits` has the blocks that are still to come from the disk, by key.

    `way` is what it counts as.
    """

    asker: Requester
    length: int
    way: str
    waits: dict[bytes, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Putting:
    """A Put under way: `place` is the next block to be given a slot, `leased` has the others' slots.

    It is given `most` slots at a time. `way` is what it counts as.
    """

    asker: Requester
    keys: Sequence[bytes]
    place: int
    way: str
    most: int
    leased: dict[int, int] = field(default_factory=dict)  # the block's index by slot


class StoreManager:
    """The accounts of a store with `slots` slots of memory over `disk_blocks` of disk (0: none).

    Some slots are spare: they are filled, or copied to the disk, while all others are full. Times are the caller's.
    """

    def __init__(self, slots: int, disk_blocks: int, eviction: str) -> None:
        if slots < 2:
            raise ValueError("a store has at least two slots: one to keep a block, and one to fill")
        self._spare = max(1, slots // 8)
        self.slots = SlotAllocator(slots)
        sizes = [slots - self._spare, *([disk_blocks] if disk_blocks else [])]
        tiers = [PrefixCache(n, create_eviction(eviction), _Watcher(self, i)) for i, n in enumerate(sizes)]
        self.tiers = TieredCache(tiers)
        self._blocks: dict[BlockKey, Block] = {}  # what is in memory
        self._leaving: dict[BlockKey, Block] = {}  # what just went from memory
        self._coming: set[bytes] = set()  # what clients are putting
        self._reading: dict[bytes, set[_Loading]] = {}  # what is to come from the disk, for whom
        self._uncopied: deque[bytes] = deque(maxlen=slots)  # what was put and has no copy on the disk yet
        self._writing = [0, 0]  # blocks that go to the disk, and those that it gets a copy of
        self._questions: dict[Requester, _Loading | _Putting] = {}
        self._waiting: deque[bytes | _Putting] = deque()  # for a free slot: blocks on the disk, and puts
        self._moves: list[DiskOperation] = []
        self._granted: list[StoreGrant] = []
        self.moved = dict.fromkeys(WAYS, 0)
        self._changes: dict[bytes, int] = {}  # 1 for blocks that came, −1 for those that went

    # -- what clients ask -------------------------------------------------------------------------------------

    def recover(self, key: bytes, position: int) -> None:
        """A block was on the disk from the start."""
        disk = self.tiers.tiers[DISK]
        if key not in disk and len(disk) < disk.capacity:
            disk.put(key, position)

    def lookup(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """How many leading blocks are here, and how many leading ones are in memory."""
        return sum(self.tiers.match(keys)), self.tiers.tiers[MEMORY].match(keys)

    def coming(self, key: bytes) -> bool:
        """Whether a block is not here yet, and somebody has a slot for it."""
        return key in self._coming

    def load(self, asker: Requester, keys: Sequence[bytes], way: str = "loaded") -> None:
        """Hold the leading blocks that are here, as they come into memory."""
        loading = _Loading(asker, sum(self.tiers.match(keys)), way)
        self._questions[asker] = loading
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
        self,
        asker: Requester,
        keys: Sequence[bytes],
        start: int,
        way: str = "stored",
        most: int | None = None,
    ) -> None:
        """Lease slots, as there are free ones, for the blocks of a prompt from the `start`-th on that are not here.

        With `most` it is that many at a time.
        """
        putting = _Putting(asker, keys, start, way, self.slots.count if most is None else most)
        self._questions[asker] = putting
        self._waiting.append(putting)
        self._advance()

    def commit(self, asker: Requester, blocks: Sequence[Block]) -> None:
        """These slots of a put are filled, and its others will not be; then it goes on."""
        putting = self._questions.get(asker)
        if not isinstance(putting, _Putting):
            return
        whole = [block for block in blocks if block.slot in putting.leased]
        self._keep(putting, {putting.leased.pop(block.slot): block for block in whole})
        self._give_up(putting)
        if putting.place < len(putting.keys):
            self._waiting.append(putting)
        else:
            self._finish(putting)
        self._advance()

    def release(self, asker: Requester, slots: Sequence[int]) -> None:
        """These slots of a load are read no more."""
        if isinstance(self._questions.get(asker), _Loading):
            for slot in slots:
                if slot in self.slots.had_by(asker):
                    self.slots.release(slot, asker)
            self._advance()

    def end(self, asker: Requester) -> None:
        """A question is over, with all that it has and waits for."""
        question = self._questions.pop(asker, None)
        if isinstance(question, _Loading):
            for key in question.waits:
                self._reading[key].discard(question)
        elif isinstance(question, _Putting):
            self._coming.difference_update(question.keys[index] for index in question.leased.values())
            if question in self._waiting:
                self._waiting.remove(question)
        self.slots.lose(asker)
        self._advance()

    def lose(self, client: str) -> None:
        """A client is dead: it touches no memory any more."""
        for asker in [asker for asker in self._questions if asker[0] == client]:
            self.end(asker)

    # -- what came of moves -------------------------------------------------------------------------------------

    def written(self, move: DiskWrite, *, done: bool) -> None:
        """A block was written to the disk, or could not be."""
        self._writing[move.spare] -= 1
        self.moved["disk_written"] += done
        self.slots.release(move.slot, _DISK)
        if not done and not move.spare:
            self._lose_from_disk(move.key, RemovalReason.DROPPED)
        self._copy_behind()
        self._advance()

    def was_read(self, move: DiskRead, checksum: int | None) -> None:
        """A block was read from the disk; its checksum is None where it is not what it was."""
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
                self.slots.drop(move.slot)  # it went from the disk meanwhile, or came back by itself
            else:
                self._blocks[move.key] = block
                self.tiers.touch((move.key,), 1)
                self._settle([move.key])
        self._advance()

    # -- what is to be done -------------------------------------------------------------------------------------

    def take_moves(self) -> list[DiskOperation]:
        """What is to be done on the disk, in this order, since this was asked last."""
        moves, self._moves = self._moves, []
        return moves

    def take_granted(self) -> list[StoreGrant]:
        """What questions got since this was asked last."""
        granted, self._granted = self._granted, []
        return granted

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The blocks that can be read since this was asked last, and those that cannot any more."""
        changes, self._changes = self._changes, {}
        return [key for key, by in changes.items() if by > 0], [key for key, by in changes.items() if by < 0]

    # -- slots --------------------------------------------------------------------------------------------------

    def _want(self, key: bytes, index: int, loading: _Loading) -> None:
        """A load waits for a block on the disk."""
        loading.waits[key] = index
        if key not in self._reading:
            self._reading[key] = set()
            self._waiting.append(key)
        self._reading[key].add(loading)

    def _advance(self) -> None:
        """Give free slots to those that wait for them."""
        while self._waiting and self.slots.num_free:
            first = self._waiting.popleft()
            if isinstance(first, _Putting):
                self._lease(first)
            elif not self._reading[first]:
                del self._reading[first]  # nobody wants it any more
            else:
                self._moves.append(DiskRead(first, self.slots.lease(_DISK)))

    def _lease(self, putting: _Putting) -> None:
        """Some slots, so that others get some too."""
        most = min(putting.most, max(1, self.slots.num_free // 2))
        while putting.place < len(putting.keys) and len(putting.leased) < most and self.slots.num_free:
            key = putting.keys[putting.place]
            if key not in self.tiers and key not in self._coming:
                putting.leased[self.slots.lease(putting.asker)] = putting.place
                self._coming.add(key)
            putting.place += 1
        if putting.leased:
            blocks = {index: Block(slot, 0) for slot, index in putting.leased.items()}
            self._granted.append(StoreGrant(putting.asker, True, blocks, False))
        else:
            self._finish(putting)

    def _finish(self, putting: _Putting) -> None:
        del self._questions[putting.asker]
        self._granted.append(StoreGrant(putting.asker, True, {}, True))

    def _give_up(self, putting: _Putting) -> None:
        for slot, index in putting.leased.items():
            self.slots.give_up(slot, putting.asker)
            self._coming.remove(putting.keys[index])
        putting.leased.clear()

    def _keep(self, putting: _Putting, whole: dict[int, Block]) -> None:
        """These blocks of a prompt, by their index, were put whole."""
        keys = putting.keys
        for index, block in whole.items():
            self._coming.remove(keys[index])
            self.slots.commit(block.slot, putting.asker)
            self._blocks[keys[index]] = block
        self.moved[putting.way] += len(whole)
        for first, end in _runs(sorted(whole)):
            self.tiers.insert(keys[:end], first)
        self._settle([keys[index] for index in whole])
        if len(self.tiers.tiers) > 1:
            self._uncopied.extend(keys[index] for index in sorted(whole))
            self._copy_behind()

    def _copy_behind(self) -> None:
        """Let the disk have copies too: they outlive this process, and cost nothing when the blocks go from memory."""
        memory = self.tiers.tiers[MEMORY]
        while self._uncopied:
            key = self._uncopied[0]
            block = self._blocks.get(key)
            if block is not None and not self._write(key, memory.position(key), block, spare=True):
                return
            self._uncopied.popleft()

    def _hold(self, block: Block, loading: _Loading) -> Block:
        self.moved[loading.way] += 1
        self.slots.hold(block.slot, loading.asker)
        return block

    def _grant_load(self, loading: _Loading, ready: dict[int, Block]) -> None:
        last = not loading.waits
        if ready or last:
            self._granted.append(StoreGrant(loading.asker, False, ready, last))

    def _cut(self, loading: _Loading, key: bytes) -> None:
        """A block of a load cannot be had: of no use are those after it."""
        loading.length = loading.waits[key]
        for other in [other for other, index in loading.waits.items() if index >= loading.length]:
            del loading.waits[other]
            if other in self._reading:
                self._reading[other].discard(loading)
        self._grant_load(loading, {})

    # -- tiers --------------------------------------------------------------------------------------------------

    def came(self, key: BlockKey) -> None:
        """The accounts have a block in one more tier."""
        self._change(key, 1)

    def went(self, tier: int, key: BlockKey, reason: RemovalReason) -> None:
        """They have it in this tier no more."""
        self._change(key, -1)
        if tier == MEMORY:
            self._leaving[key] = self._blocks.pop(key)
        else:
            self._moves.append((DiskSpare if reason is RemovalReason.MOVED else DiskForget)(_live(key)))

    def _settle(self, came: Sequence[bytes]) -> None:
        """The accounts took in blocks: what went from memory for them is written to the disk, where that keeps up."""
        for key in came:
            if key in self._blocks and key not in self.tiers.tiers[MEMORY]:
                self._leaving[key] = self._blocks.pop(key)  # there was no room for it
        leaving, self._leaving = self._leaving, {}
        for left, block in leaving.items():
            disk = self.tiers.tiers[DISK] if len(self.tiers.tiers) > 1 else None
            goes_down = disk is not None and left in disk
            if (
                disk is not None
                and goes_down
                and not self._write(_live(left), disk.position(left), block, spare=False)
            ):
                disk.remove(left, RemovalReason.DROPPED)
            self.slots.drop(block.slot)

    def _write(self, key: bytes, position: int, block: Block, *, spare: bool) -> bool:
        """Whether the disk keeps up, so that it may be asked to."""
        keeps_up = self._writing[spare] < self._spare
        if keeps_up:
            self._writing[spare] += 1
            self.slots.hold(block.slot, _DISK)
            self._moves.append(DiskWrite(key, position, block.slot, block.checksum, spare))
        return keeps_up

    def _lose_from_disk(self, key: bytes, reason: RemovalReason) -> None:
        if key in self.tiers.tiers[DISK]:
            self.tiers.tiers[DISK].remove(key, reason)

    def _change(self, key: BlockKey, by: int) -> None:
        change = self._changes.get(_live(key), 0) + by
        if change:
            self._changes[_live(key)] = change
        else:
            del self._changes[_live(key)]


class _Watcher(CacheObserver):
    """Tells the book of one tier."""

    def __init__(self, book: StoreManager, tier: int) -> None:
        self._book, self._tier = book, tier

    def stored(self, key: BlockKey) -> None:
        self._book.came(key)

    def removed(self, key: BlockKey, reason: RemovalReason) -> None:
        self._book.went(self._tier, key, reason)


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours among ascending numbers, as (first, behind the last)."""
    among = set(indices)
    starts = [index for index in indices if index - 1 not in among]
    ends = [index + 1 for index in indices if index + 1 not in among]
    return list(zip(starts, ends, strict=True))


def _live(key: BlockKey) -> bytes:
    """Keys of traces are numbers; those of a live service are not."""
    assert isinstance(key, bytes)  # noqa: S101  (tells the type checker)
    return key
