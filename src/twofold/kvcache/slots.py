"""Slots of one memory of blocks that several processes fill and read, none of which can be trusted to live."""

from collections.abc import Collection, Hashable
from heapq import heapify, heappop, heappush

from twofold.errors import OutOfBlocksError

Holder = Hashable


class SlotAllocator:
    """Who may touch each of the slots 0 … count − 1.

        free ── lease ──▶ leased ── commit ──▶ whole, kept ── drop ──▶ whole, dropped ── last hold ends ──▶ free
                            └────── give_up ──▶ free

    A leased slot is its holder's alone: nobody reads it. One that is whole is written by nobody any more, and read by
    those who hold it. It is free only when it is neither kept nor held, so what is dropped stays as it is until its
    last reader is done. All that a holder has ends with `lose`, at once, so that is to be called when it can touch no
    memory any more. Raises ValueError, and changes nothing, for what a holder does not have.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError("a memory of blocks has at least one slot")
        self.count = count
        # A heap, as in `BlockManager`: neighbours are copied together.
        self._free = list(range(count))
        heapify(self._free)
        self._leased: dict[int, Holder] = {}
        self._kept: set[int] = set()
        self._holds: dict[int, dict[Holder, int]] = {}  # by slot: how often each holder has it
        self._had: dict[Holder, set[int]] = {}  # by holder: slots that it leases or holds

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def had_by(self, holder: Holder) -> Collection[int]:
        """The slots that it leases or holds."""
        return self._had.get(holder, ())

    def leased_to(self, slot: int, holder: Holder) -> bool:
        return self._leased.get(slot) == holder

    def readable(self, slot: int) -> bool:
        """Whether it is whole, and kept for those who come."""
        return slot in self._kept

    def lease(self, holder: Holder) -> int:
        """Give a free slot to be filled; raises OutOfBlocksError if there is none."""
        if not self._free:
            raise OutOfBlocksError(f"none of {self.count} slots is free")
        slot = heappop(self._free)
        self._leased[slot] = holder
        self._had.setdefault(holder, set()).add(slot)
        return slot

    def give_up(self, slot: int, holder: Holder) -> None:
        """What was to be filled will not be."""
        self._end_lease(slot, holder)
        heappush(self._free, slot)

    def commit(self, slot: int, holder: Holder) -> None:
        """It is whole: its holder writes no more."""
        self._end_lease(slot, holder)
        self._kept.add(slot)

    def hold(self, slot: int, holder: Holder) -> None:
        """A reader has it, once more."""
        if slot not in self._kept and slot not in self._holds:
            raise ValueError(f"slot {slot} is not whole")
        holds = self._holds.setdefault(slot, {})
        holds[holder] = holds.get(holder, 0) + 1
        self._had.setdefault(holder, set()).add(slot)

    def release(self, slot: int, holder: Holder) -> None:
        """A reader has it once less."""
        holds = self._holds.get(slot, {})
        if holder not in holds:
            raise ValueError(f"{holder} does not hold slot {slot}")
        holds[holder] -= 1
        if not holds[holder]:
            self._end_holds(slot, holder)

    def drop(self, slot: int) -> None:
        """It is not kept any more: free at once, or when its last reader is done."""
        if slot not in self._kept:
            raise ValueError(f"slot {slot} is not kept")
        self._kept.remove(slot)
        if slot not in self._holds:
            heappush(self._free, slot)

    def lose(self, holder: Holder) -> None:
        """A holder is gone: its leases are given up, and it reads no more."""
        for slot in sorted(self._had.get(holder, ())):
            if self.leased_to(slot, holder):
                self.give_up(slot, holder)
            else:
                self._end_holds(slot, holder)

    def _end_lease(self, slot: int, holder: Holder) -> None:
        if not self.leased_to(slot, holder):
            raise ValueError(f"{holder} does not lease slot {slot}")
        del self._leased[slot]
        self._forget(slot, holder)

    def _end_holds(self, slot: int, holder: Holder) -> None:
        holds = self._holds[slot]
        del holds[holder]
        self._forget(slot, holder)
        if not holds:
            del self._holds[slot]
            if slot not in self._kept:
                heappush(self._free, slot)

    def _forget(self, slot: int, holder: Holder) -> None:
        had = self._had[holder]
        had.remove(slot)
        if not had:
            del self._had[holder]
