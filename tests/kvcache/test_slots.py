"""Slots of a KV store, which several processes write and read."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twofold.errors import OutOfBlocksError
from twofold.kvcache.slots import SlotAllocator

COUNT = 4
HOLDERS = ("a", "b", "disk")


def test_a_dropped_slot_is_free_after_its_last_reader():
    slots = SlotAllocator(1)
    slot = slots.lease("writer")
    with pytest.raises(OutOfBlocksError):
        slots.lease("other")
    with pytest.raises(ValueError, match="is not committed"):
        slots.hold(slot, "reader")
    slots.commit(slot, "writer")
    slots.hold(slot, "reader")
    slots.drop(slot)
    assert not slots.num_free, "a reader holds the slot"
    slots.release(slot, "reader")
    assert slots.num_free == 1


def test_giving_up_a_lease_frees_the_slot():
    slots = SlotAllocator(1)
    slot = slots.lease("writer")
    with pytest.raises(ValueError, match="does not lease"):
        slots.commit(slot, "other")
    slots.give_up(slot, "writer")
    assert slots.num_free == 1


def test_lose_ends_all_rights_of_one_holder():
    slots = SlotAllocator(3)
    whole, filling = slots.lease("a"), slots.lease("a")
    slots.commit(whole, "a")
    slots.hold(whole, "a")
    slots.hold(whole, "a")
    slots.hold(whole, "b")
    slots.drop(whole)
    slots.lose("a")
    assert not slots.leased_to(filling, "a")
    assert not slots.had_by("a")
    assert slots.num_free == 2
    slots.lose("b")
    assert slots.num_free == 3


class SlotLives(RuleBasedStateMachine):
    """State machine that compares the slot allocator with plain sets."""

    def __init__(self):
        super().__init__()
        self.slots = SlotAllocator(COUNT)
        self.leased = {}
        self.kept = set()
        self.holds = []  # (slot, holder), once per hold

    def busy(self):
        return set(self.leased) | self.kept | {slot for slot, _ in self.holds}

    @precondition(lambda self: len(self.busy()) < COUNT)
    @rule(holder=st.sampled_from(HOLDERS))
    def lease(self, holder):
        slot = self.slots.lease(holder)
        assert slot not in self.busy(), "leased a slot in use"
        self.leased[slot] = holder

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), whole=st.booleans())
    def end_lease(self, data, whole):
        slot = data.draw(st.sampled_from(sorted(self.leased)))
        holder = self.leased.pop(slot)
        (self.slots.commit if whole else self.slots.give_up)(slot, holder)
        if whole:
            self.kept.add(slot)

    @precondition(lambda self: self.kept or self.holds)
    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def hold(self, data, holder):
        slot = data.draw(st.sampled_from(sorted(self.kept | {slot for slot, _ in self.holds})))
        self.slots.hold(slot, holder)
        self.holds.append((slot, holder))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data):
        slot, holder = data.draw(st.sampled_from(self.holds))
        self.slots.release(slot, holder)
        self.holds.remove((slot, holder))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data):
        slot = data.draw(st.sampled_from(sorted(self.kept)))
        self.slots.drop(slot)
        self.kept.remove(slot)

    @rule(holder=st.sampled_from(HOLDERS))
    def lose(self, holder):
        self.slots.lose(holder)
        self.leased = {slot: by for slot, by in self.leased.items() if by != holder}
        self.holds = [(slot, by) for slot, by in self.holds if by != holder]

    @invariant()
    def all_is_accounted_for(self):
        assert self.slots.num_free == COUNT - len(self.busy())
        assert all(self.slots.leased_to(slot, holder) for slot, holder in self.leased.items())
        for holder in HOLDERS:
            had = {slot for slot, by in self.leased.items() if by == holder}
            had |= {slot for slot, by in self.holds if by == holder}
            assert set(self.slots.had_by(holder)) == had


TestSlotLives = SlotLives.TestCase
