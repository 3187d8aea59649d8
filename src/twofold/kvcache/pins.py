"""Until when blocks are pinned."""

from heapq import heapify, heappop, heappush

from twofold.request import BlockKey


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
