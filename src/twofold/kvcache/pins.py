"""Until when blocks are pinned."""

from heapq import heappop, heappush

from twofold.request import BlockKey


class Pins:
    """Blocks that are kept until a time, each until the latest that it was pinned for."""

    def __init__(self) -> None:
        self._until: dict[BlockKey, float] = {}
        # (until, number, block): a block that is pinned for longer, or dropped, leaves its old entry to be skipped.
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
            heappush(self._ends, (until, self._entries, key))

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
