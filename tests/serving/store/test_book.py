"""The accounts of a store: whatever clients, the disk and death do, what is read is whole."""

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twofold.serving.store.manager import (
    DISK,
    MEMORY,
    DiskForget,
    DiskRead,
    DiskSpare,
    DiskWrite,
    StoreManager,
)
from twofold.serving.store.messages import Block

SLOTS, DISK_BLOCKS = 9, 6
PROMPTS = [[bytes([prompt, i]) for i in range(7)] for prompt in range(3)]
CLIENTS = ("a", "b", "c")


def put(book, keys, asker=("a", 1)):
    """Put blocks as a client does, with checksums that say which they are; the disk does what it is asked to."""
    book.put(asker, keys, 0)
    last = False
    while not last:
        for part in book.take_granted():
            book.commit(asker, [Block(block.slot, keys[index][-1]) for index, block in part.blocks.items()])
            last = part.last
        write_all(book)


def write_all(book):
    for move in book.take_moves():
        if isinstance(move, DiskWrite):
            book.written(move, done=True)


def test_what_was_put_is_held_with_its_checksum():
    """Blocks are found when they are committed, leading ones only, and given in memory."""
    book = StoreManager(16, 0, "lru")
    keys = PROMPTS[0][:3]
    put(book, keys)
    assert book.lookup([*keys, b"other"]) == (3, 3)
    assert book.lookup([b"other", *keys]) == (0, 0)
    book.load(("b", 1), keys)
    (granted,) = book.take_granted()
    assert granted.last
    assert [block.checksum for block in granted.blocks.values()] == [0, 1, 2]


def test_what_is_leased_is_not_found():
    """A block that somebody fills is nobody's: not read, and not filled by another at the same time."""
    book = StoreManager(16, 0, "lru")
    book.put(("a", 1), PROMPTS[0][:1], 0)
    book.put(("b", 1), PROMPTS[0][:1], 0)
    first, second = book.take_granted()
    assert first.blocks
    assert not second.blocks
    assert second.last
    assert book.lookup(PROMPTS[0][:1]) == (0, 0)


def test_a_dead_writer_leaves_nothing():
    """Its slots are free, and others may put the same blocks."""
    book = StoreManager(16, 0, "lru")
    book.put(("a", 1), PROMPTS[0][:1], 0)
    book.lose("a")
    assert book.slots.num_free == 16
    book.take_granted()
    put(book, PROMPTS[0][:1], ("b", 1))
    assert book.lookup(PROMPTS[0][:1]) == (1, 1)


def test_blocks_go_down_and_come_up():
    """What memory has no room for is on the disk, and is read from there when it is wanted."""
    book = StoreManager(SLOTS, DISK_BLOCKS, "lru")
    for prompt in PROMPTS[:2]:
        put(book, prompt)
    assert len(book.tiers.tiers[MEMORY]) == 8
    blocks, in_memory = book.lookup(PROMPTS[0])
    assert (blocks, in_memory) == (7, 0)
    book.load(("b", 2), PROMPTS[0][:1])
    assert not book.take_granted(), "it is on the disk yet"
    (read,) = [move for move in book.take_moves() if isinstance(move, DiskRead)]
    book.was_read(read, 17)
    (granted,) = book.take_granted()
    assert granted.blocks == {0: Block(read.slot, 17)}
    assert granted.last
    assert book.lookup(PROMPTS[0][:1]) == (1, 1)


def test_a_damaged_block_ends_what_waits_for_it():
    """Blocks before it can be used; it, and those after it, cannot; and it is forgotten."""
    book = StoreManager(SLOTS, DISK_BLOCKS, "lru")
    for prompt in PROMPTS[:2]:
        put(book, prompt)
    book.load(("b", 2), PROMPTS[0][:3])
    (first,) = [move for move in book.take_moves() if isinstance(move, DiskRead)]
    book.was_read(first, 1)
    write_all(book)
    (second,) = [move for move in book.take_moves() if isinstance(move, DiskRead)]
    book.was_read(second, None)
    granted = book.take_granted()
    assert [index for part in granted for index in part.blocks] == [0]
    assert granted[-1].last
    assert book.lookup(PROMPTS[0]) == (1, 1)
    assert DiskForget(PROMPTS[0][1]) in book.take_moves()


@pytest.mark.parametrize("slots", [0, 1])
def test_a_store_keeps_something(slots):
    """One slot has to be free to be filled, so there are two at least."""
    with pytest.raises(ValueError, match="at least two slots"):
        StoreManager(slots, 0, "lru")


class StoreLives(RuleBasedStateMachine):
    """Clients put, load and die at any time, and the disk works when it likes, fails or spoils what it has.

    `memory` and `disk` have what is really there: the key of a block that is whole, or None.
    """

    def __init__(self):
        super().__init__()
        self.book = StoreManager(SLOTS, DISK_BLOCKS, "lru")
        self.memory = [None] * SLOTS
        self.disk, self.spare = {}, {}
        self.moves = deque()
        self.number = 0
        self.loads, self.puts = {}, {}  # by asker: its keys
        self.reading, self.filling = {}, {}  # by asker: slots and the keys that are, or are to be, in them
        self.known = set()

    def turn(self):
        """What the process does after each event."""
        self.moves.extend(self.book.take_moves())
        for granted in self.book.take_granted():
            keys = (self.puts if granted.puts else self.loads).get(granted.asker)
            if keys is None:
                continue  # its client is dead, or has ended it
            for index, block in granted.blocks.items():
                if granted.puts:
                    self.memory[block.slot] = None  # it is being filled, for all that anybody knows
                    self.filling[granted.asker][block.slot] = keys[index]
                else:
                    self.reading[granted.asker][block.slot] = keys[index]
            if granted.puts and granted.last:
                del self.puts[granted.asker], self.filling[granted.asker]
        stored, removed = self.book.take_changes()
        assert not self.known & set(stored)
        assert set(removed) <= self.known
        self.known = (self.known | set(stored)) - set(removed)

    def asker(self, client):
        self.number += 1
        return client, self.number

    @rule(client=st.sampled_from(CLIENTS), prompt=st.sampled_from(PROMPTS), count=st.integers(1, 7))
    def load(self, client, prompt, count):
        asker = self.asker(client)
        self.loads[asker], self.reading[asker] = prompt[:count], {}
        self.book.load(asker, prompt[:count])
        self.turn()

    @rule(
        client=st.sampled_from(CLIENTS),
        prompt=st.sampled_from(PROMPTS),
        start=st.integers(0, 6),
        count=st.integers(1, 7),
    )
    def put(self, client, prompt, start, count):
        asker = self.asker(client)
        self.puts[asker], self.filling[asker] = prompt[:count], {}
        self.book.put(asker, prompt[:count], min(start, count))
        self.turn()

    @precondition(lambda self: any(self.filling.values()))
    @rule(data=st.data())
    def commit(self, data):
        asker = data.draw(st.sampled_from([asker for asker, slots in self.filling.items() if slots]))
        slots = self.filling[asker]
        whole = data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True))
        for slot in whole:
            self.memory[slot] = slots[slot]
        self.filling[asker] = {}
        self.book.commit(asker, [Block(slot, 0) for slot in whole])
        self.turn()

    @precondition(lambda self: any(self.reading.values()))
    @rule(data=st.data())
    def release(self, data):
        asker = data.draw(st.sampled_from([asker for asker, slots in self.reading.items() if slots]))
        done = data.draw(st.lists(st.sampled_from(sorted(self.reading[asker])), unique=True))
        for slot in done:
            del self.reading[asker][slot]
        self.book.release(asker, done)
        self.turn()

    @precondition(lambda self: self.loads or self.puts)
    @rule(data=st.data())
    def end(self, data):
        asker = data.draw(st.sampled_from([*self.loads, *self.puts]))
        for of in (self.loads, self.puts, self.reading, self.filling):
            of.pop(asker, None)
        self.book.end(asker)
        self.turn()

    @rule(client=st.sampled_from(CLIENTS))
    def die(self, client):
        for of in (self.loads, self.puts, self.reading, self.filling):
            for asker in [asker for asker in of if asker[0] == client]:
                del of[asker]
        self.book.lose(client)
        self.turn()

    @precondition(lambda self: self.moves)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def move(self, fails=False):
        move = self.moves.popleft()
        match move:
            case DiskWrite(key=key):
                assert self.memory[move.slot] == key, "a torn block goes to the disk"
                self.book.written(move, done=not fails and self.write(key, move.spare))
            case DiskRead(key=key):
                found = self.disk.get(key)
                self.memory[move.slot] = found
                self.book.was_read(move, None if fails or found is None else 0)
            case DiskSpare(key=key):
                if key in self.disk:
                    self.spare[key] = None
            case DiskForget(key=key):
                self.disk.pop(key, None)
                self.spare.pop(key, None)
        self.turn()

    def write(self, key, spare):
        """As `DiskBlocks` does."""
        self.spare.pop(key, None)
        if key not in self.disk and len(self.disk) == DISK_BLOCKS and self.spare:
            oldest = next(iter(self.spare))
            del self.spare[oldest], self.disk[oldest]
        if key not in self.disk and len(self.disk) == DISK_BLOCKS:
            return False
        self.disk[key] = key
        if spare:
            self.spare[key] = None
        return True

    @invariant()
    def what_is_read_is_whole(self):
        for slots in self.reading.values():
            for slot, key in slots.items():
                assert self.memory[slot] == key

    @invariant()
    def capacity_is_kept(self):
        assert len(self.book.tiers.tiers[MEMORY]) <= SLOTS
        assert len(self.book.tiers.tiers[DISK]) <= DISK_BLOCKS
        assert len(self.disk) <= DISK_BLOCKS

    @invariant()
    def what_is_told_is_there(self):
        assert self.known == {key for prompt in PROMPTS for key in prompt if key in self.book.tiers}

    def teardown(self):
        """When everybody is gone and the disk is done, all slots are free but those that blocks are kept in."""
        for client in CLIENTS:
            self.die(client)
        while self.moves:
            self.move()
        self.turn()
        assert not self.moves
        assert self.book.slots.num_free == SLOTS - len(self.book.tiers.tiers[MEMORY])


TestStoreLives = StoreLives.TestCase
