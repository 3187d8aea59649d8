"""Block accounts that know each block of a paged KV cache by its number."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from twofold.errors import OutOfBlocksError
from twofold.kvcache.accounts import BlockAccounts


class BlockManager(BlockAccounts):
    """`BlockAccounts` for a live worker: hands out the blocks 0 … num_blocks − 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a block manager needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A heap: the lowest ids go first, so that blocks of a request are neighbours as often as can be (engines and
        # transports are faster on runs), and equal sets of free blocks give equal allocations.
        self._free = list(range(num_blocks))
        self._holds = [0] * num_blocks
        self._owned: dict[str, list[int]] = {}
        self._in_flight: dict[str, tuple[int, ...]] = {}
        # Asked for in every iteration, so it is kept up to date rather than counted anew.
        self._touched_by = [0] * num_blocks
        self._num_in_flight = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Blocks that some request needs."""
        return sum(map(len, self._owned.values()))

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def owners(self) -> frozenset[str]:
        return frozenset(self._owned)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def fits(self, tokens: int) -> bool:
        return self.blocks_for(tokens) <= len(self._free)

    def owns(self, owner: str) -> bool:
        return owner in self._owned

    def blocks_of(self, owner: str) -> Sequence[int]:
        return self._owned[owner]

    def allocate(self, owner: str, tokens: int) -> None:
        if owner in self._owned:
            raise ValueError(f"{owner} already owns blocks")
        self._owned[owner] = self._take(owner, tokens)

    def extend(self, owner: str, tokens: int) -> None:
        self._owned[owner] += self._take(owner, tokens)

    def release(self, owner: str) -> None:
        self._drop(self._owned.pop(owner))

    def begin_transfer(self, transfer: str, owner: str) -> None:
        if transfer in self._in_flight:
            raise ValueError(f"transfer {transfer} is already in flight")
        held = self._in_flight[transfer] = tuple(self._owned[owner])
        self._hold(held)
        for block in held:
            self._num_in_flight += self._touched_by[block] == 0
            self._touched_by[block] += 1

    def end_transfer(self, transfer: str) -> None:
        held = self._in_flight.pop(transfer)
        for block in held:
            self._touched_by[block] -= 1
            self._num_in_flight -= self._touched_by[block] == 0
        self._drop(held)

    def _take(self, owner: str, tokens: int) -> list[int]:
        count = self.blocks_for(tokens)
        if count > len(self._free):
            raise OutOfBlocksError(f"{owner} needs {count} blocks and {len(self._free)} are free")
        blocks = [heappop(self._free) for _ in range(count)]
        self._hold(blocks)
        return blocks

    def _hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holds[block] += 1

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holds[block] -= 1
            if self._holds[block] == 0:
                heappush(self._free, block)
