"""The block manager of a KV store, tested with random events of clients and disk."""

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twofold.serving.store.manager import DISK, MEMORY, StoreManager
from twofold.serving.store.messages import Block, DiskForget, DiskRead, DiskSpare, DiskWrite

SLOTS, DISK_BLOCKS = 9, 6
PROMPTS = [[bytes([prompt, i]) for i in range(7)] for prompt in range(3)]
CLIENTS = ("a", "b", "c")


def put(manager, keys, requester=("a", 1)):
    """Put blocks into the store, and complete all disk writes."""
    manager.put(requester, keys, 0)
    last = False
    while not last:
        for part in manager.take_grants():
            manager.commit(requester, [Block(block.slot, keys[index][-1]) for index, block in part.blocks.items()])
            last = part.last
        write_all(manager)


def write_all(manager):
    for move in manager.take_moves():
        if isinstance(move, DiskWrite):
            manager.written(move, done=True)


def test_loads_committed_blocks_with_their_checksums():
    manager = StoreManager(16, 0, "lru")
    keys = PROMPTS[0][:3]
    put(manager, keys)
    assert manager.lookup([*keys, b"other"]) == (3, 3)
    assert manager.lookup([b"other", *keys]) == (0, 0)
    manager.load(("b", 1), keys)
    (granted,) = manager.take_grants()
    assert granted.last
    assert [block.checksum for block in granted.blocks.values()] == [0, 1, 2]


def test_leased_blocks_are_neither_readable_nor_leased_again():
    manager = StoreManager(16, 0, "lru")
    manager.put(("a", 1), PROMPTS[0][:1], 0)
    manager.put(("b", 1), PROMPTS[0][:1], 0)
    first, second = manager.take_grants()
    assert first.blocks
    assert not second.blocks
    assert second.last
    assert manager.lookup(PROMPTS[0][:1]) == (0, 0)


def test_frees_the_slots_of_a_dead_writer():
    manager = StoreManager(16, 0, "lru")
    manager.put(("a", 1), PROMPTS[0][:1], 0)
    manager.lose("a")
    assert manager.slots.num_free == 16
    manager.take_grants()
    put(manager, PROMPTS[0][:1], ("b", 1))
    assert manager.lookup(PROMPTS[0][:1]) == (1, 1)


def test_evicts_to_disk_and_reads_back():
    manager = StoreManager(SLOTS, DISK_BLOCKS, "lru")
    for prompt in PROMPTS[:2]:
        put(manager, prompt)
    assert len(manager.tiers.tiers[MEMORY]) == 8
    blocks, in_memory = manager.lookup(PROMPTS[0])
    assert (blocks, in_memory) == (7, 0)
    manager.load(("b", 2), PROMPTS[0][:1])
    assert not manager.take_grants(), "the disk read is pending"
    (read,) = [move for move in manager.take_moves() if isinstance(move, DiskRead)]
    manager.was_read(read, 17)
    (granted,) = manager.take_grants()
    assert granted.blocks == {0: Block(read.slot, 17)}
    assert granted.last
    assert manager.lookup(PROMPTS[0][:1]) == (1, 1)


def test_a_damaged_block_ends_its_loads():
    manager = StoreManager(SLOTS, DISK_BLOCKS, "lru")
    for prompt in PROMPTS[:2]:
        put(manager, prompt)
    manager.load(("b", 2), PROMPTS[0][:3])
    (first,) = [move for move in manager.take_moves() if isinstance(move, DiskRead)]
    manager.was_read(first, 1)
    write_all(manager)
    (second,) = [move for move in manager.take_moves() if isinstance(move, DiskRead)]
    manager.was_read(second, None)
    granted = manager.take_grants()
    assert [index for part in granted for index in part.blocks] == [0]
    assert granted[-1].last
    assert manager.lookup(PROMPTS[0]) == (1, 1)
    assert DiskForget(PROMPTS[0][1]) in manager.take_moves()


@pytest.mark.parametrize("slots", [0, 1])
def test_rejects_a_single_slot(slots):
    with pytest.raises(ValueError, match="at least two slots"):
        StoreManager(slots, 0, "lru")


class StoreLives(RuleBasedStateMachine):
    """Hypothesis state machine that tests a KV store with clients, crashes and disk errors."""

    def __init__(self):
        super().__init__()
        self.manager = StoreManager(SLOTS, DISK_BLOCKS, "lru")
        self.memory = [None] * SLOTS
        self.disk, self.spare = {}, {}
        self.moves = deque()
        self.number = 0
        self.loads, self.puts = {}, {}  # keys by requester
        self.reading, self.filling = {}, {}  # by requester: keys by slot
        self.known = set()

    def turn(self):
        """Process the block manager's outputs; check that no block is reported as stored twice or removed twice."""
        self.moves.extend(self.manager.take_moves())
        for granted in self.manager.take_grants():
            keys = (self.puts if granted.puts else self.loads).get(granted.requester)
            if keys is None:
                continue  # the client died or ended the request
            for index, block in granted.blocks.items():
                if granted.puts:
                    self.memory[block.slot] = None  # contents undefined until the commit
                    self.filling[granted.requester][block.slot] = keys[index]
                else:
                    self.reading[granted.requester][block.slot] = keys[index]
            if granted.puts and granted.last:
                del self.puts[granted.requester], self.filling[granted.requester]
        stored, removed = self.manager.changes.take()
        assert not self.known & set(stored)
        assert set(removed) <= self.known
        self.known = (self.known | set(stored)) - set(removed)

    def requester(self, client):
        self.number += 1
        return client, self.number

    @rule(client=st.sampled_from(CLIENTS), prompt=st.sampled_from(PROMPTS), count=st.integers(1, 7))
    def load(self, client, prompt, count):
        requester = self.requester(client)
        self.loads[requester], self.reading[requester] = prompt[:count], {}
        self.manager.load(requester, prompt[:count])
        self.turn()

    @rule(
        client=st.sampled_from(CLIENTS),
        prompt=st.sampled_from(PROMPTS),
        start=st.integers(0, 6),
        count=st.integers(1, 7),
    )
    def put(self, client, prompt, start, count):
        requester = self.requester(client)
        self.puts[requester], self.filling[requester] = prompt[:count], {}
        self.manager.put(requester, prompt[:count], min(start, count))
        self.turn()

    @precondition(lambda self: any(self.filling.values()))
    @rule(data=st.data())
    def commit(self, data):
        requester = data.draw(st.sampled_from([requester for requester, slots in self.filling.items() if slots]))
        slots = self.filling[requester]
        whole = data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True))
        for slot in whole:
            self.memory[slot] = slots[slot]
        self.filling[requester] = {}
        self.manager.commit(requester, [Block(slot, 0) for slot in whole])
        self.turn()

    @precondition(lambda self: any(self.reading.values()))
    @rule(data=st.data())
    def release(self, data):
        requester = data.draw(st.sampled_from([requester for requester, slots in self.reading.items() if slots]))
        done = data.draw(st.lists(st.sampled_from(sorted(self.reading[requester])), unique=True))
        for slot in done:
            del self.reading[requester][slot]
        self.manager.release(requester, done)
        self.turn()

    @precondition(lambda self: self.loads or self.puts)
    @rule(data=st.data())
    def end(self, data):
        requester = data.draw(st.sampled_from([*self.loads, *self.puts]))
        for of in (self.loads, self.puts, self.reading, self.filling):
            of.pop(requester, None)
        self.manager.end(requester)
        self.turn()

    @rule(client=st.sampled_from(CLIENTS))
    def die(self, client):
        for of in (self.loads, self.puts, self.reading, self.filling):
            for requester in [requester for requester in of if requester[0] == client]:
                del of[requester]
        self.manager.lose(client)
        self.turn()

    @precondition(lambda self: self.moves)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def move(self, fails=False):
        move = self.moves.popleft()
        match move:
            case DiskWrite(key=key):
                assert self.memory[move.slot] == key, "wrote an incomplete block to disk"
                self.manager.written(move, done=not fails and self.write(key, move.spare))
            case DiskRead(key=key):
                found = self.disk.get(key)
                self.memory[move.slot] = found
                self.manager.was_read(move, None if fails or found is None else 0)
            case DiskSpare(key=key):
                if key in self.disk:
                    self.spare[key] = None
            case DiskForget(key=key):
                self.disk.pop(key, None)
                self.spare.pop(key, None)
        self.turn()

    def write(self, key, spare):
        """Write a block to the simulated disk; return False if there is no room."""
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
        assert len(self.manager.tiers.tiers[MEMORY]) <= SLOTS
        assert len(self.manager.tiers.tiers[DISK]) <= DISK_BLOCKS
        assert len(self.disk) <= DISK_BLOCKS

    @invariant()
    def what_is_told_is_there(self):
        assert self.known == {key for prompt in PROMPTS for key in prompt if key in self.manager.tiers}

    def teardown(self):
        """End all clients, then check that no slot of the memory tier is still leased."""
        for client in CLIENTS:
            self.die(client)
        while self.moves:
            self.move()
        self.turn()
        assert not self.moves
        assert self.manager.slots.num_free == SLOTS - len(self.manager.tiers.tiers[MEMORY])


TestStoreLives = StoreLives.TestCase
