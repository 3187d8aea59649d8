"""Allocator of slots in a shared memory for KV blocks, with leases for writing and holds for reading."""

from collections.abc import Collection, Hashable
from heapq import heappop, heappush

from twofold.errors import OutOfBlocksError

Holder = Hashable


#   free ── lease ──▶ leased ── commit ──▶ kept ── drop ──▶ dropped ── last hold ends ──▶ free
#                       └────── give_up ──▶ free
#
# Only the holder of its lease may access a leased slot. A committed slot is read-only and is kept until `drop`; then it
# becomes free when no reader holds it. Call `lose` only after the holder can no longer access the memory. If a holder
# lacks the required right, methods raise ValueError and change nothing.
class SlotAllocator:
    """Allocator of shared-memory slots. Processes lease slots for writing, and hold slots for reading."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError("a block memory needs at least one slot")
        self.count = count
        # A heap, as in `PagedBlockAllocator`: neighbouring slots are copied together.
        self._free = list(range(count))
        self._leased: dict[int, Holder] = {}
        self._kept: set[int] = set()
        self._holds: dict[int, dict[Holder, int]] = {}  # by slot: number of holds of each holder
        self._had: dict[Holder, set[int]] = {}  # slots that each holder leases or holds

    @property
    def num_free(self) -> int:
        return len(self._free)

    def had_by(self, holder: Holder) -> Collection[int]:
        """Return the slots that a holder has leased for writing or holds for reading."""
        return self._had.get(holder, ())

    def leased_to(self, slot: int, holder: Holder) -> bool:
        return self._leased.get(slot) == holder

    def lease(self, holder: Holder) -> int:
        """Lease a free slot for writing, and return its number. Raises OutOfBlocksError if no slot is free."""
        if not self._free:
            raise OutOfBlocksError(f"all {self.count} slots are in use")
        slot = heappop(self._free)
        self._leased[slot] = holder
        self._had.setdefault(holder, set()).add(slot)
        return slot

    def give_up(self, slot: int, holder: Holder) -> None:
        """End the lease of a slot that was not completely written, and free the slot."""
        self._end_lease(slot, holder)
        heappush(self._free, slot)

    def commit(self, slot: int, holder: Holder) -> None:
        """End the lease of a completely written slot, so that readers can use the slot."""
        self._end_lease(slot, holder)
        self._kept.add(slot)

    def hold(self, slot: int, holder: Holder) -> None:
        """Add a reader's hold to a committed slot, which then stays readable until `release`."""
        if slot not in self._kept and slot not in self._holds:
            raise ValueError(f"slot {slot} is not committed")
        holds = self._holds.setdefault(slot, {})
        holds[holder] = holds.get(holder, 0) + 1
        self._had.setdefault(holder, set()).add(slot)

    def release(self, slot: int, holder: Holder) -> None:
        """Remove one read reference of `holder` to a slot. Raises ValueError if there is none."""
        holds = self._holds.get(slot, {})
        if holder not in holds:
            raise ValueError(f"{holder} does not hold slot {slot}")
        holds[holder] -= 1
        if not holds[holder]:
            self._end_holds(slot, holder)

    def drop(self, slot: int) -> None:
        """Free a committed slot as soon as no reader holds it."""
        if slot not in self._kept:
            raise ValueError(f"slot {slot} is not kept")
        self._kept.remove(slot)
        if slot not in self._holds:
            heappush(self._free, slot)

    def lose(self, holder: Holder) -> None:
        """Remove all write leases and read holds of a process that has crashed or left."""
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
