"""Block accounts that count: each operation takes the same time however many blocks it is about."""

from twofold.errors import OutOfBlocksError
from twofold.kvcache.accounts import BlockAccounts


class _Grant:
    """Blocks given to an owner at once or bit by bit; they become free together, when nothing holds them."""

    __slots__ = ("blocks", "holds", "transfers")

    def __init__(self, blocks: int, holds: int = 1, transfers: int = 0) -> None:
        self.blocks = blocks
        self.holds = holds
        self.transfers = transfers


class BlockCounts(BlockAccounts):
    """`BlockAccounts` for a simulation. Blocks that an owner gets while a transfer runs count as touched by it too."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("block accounts need at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = num_blocks
        self._touched = 0
        self._owned: dict[str, _Grant] = {}
        self._in_flight: dict[str, _Grant] = {}

    @property
    def num_free(self) -> int:
        return self._free

    @property
    def num_in_flight(self) -> int:
        return self._touched

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def fits(self, tokens: int) -> bool:
        return -(-tokens // self.block_size) <= self._free

    def owns(self, owner: str) -> bool:
        return owner in self._owned

    def blocks_of(self, owner: str) -> tuple[int, ...]:  # noqa: ARG002  (which they are, nobody knows)
        return ()

    def allocate(self, owner: str, tokens: int) -> None:
        if owner in self._owned:
            raise ValueError(f"{owner} already owns blocks")
        self._owned[owner] = _Grant(self._take(owner, tokens))

    def extend(self, owner: str, tokens: int) -> None:
        grant, blocks = self._owned[owner], self._take(owner, tokens)
        grant.blocks += blocks
        if grant.transfers:
            self._touched += blocks

    def release(self, owner: str) -> None:
        self._drop(self._owned.pop(owner))

    def begin_transfer(self, transfer: str, owner: str) -> None:
        if transfer in self._in_flight:
            raise ValueError(f"transfer {transfer} is already in flight")
        grant = self._in_flight[transfer] = self._owned[owner]
        grant.holds += 1
        grant.transfers += 1
        if grant.transfers == 1:
            self._touched += grant.blocks

    def end_transfer(self, transfer: str) -> None:
        grant = self._in_flight.pop(transfer)
        grant.transfers -= 1
        if grant.transfers == 0:
            self._touched -= grant.blocks
        self._drop(grant)

    def _take(self, owner: str, tokens: int) -> int:
        blocks = -(-tokens // self.block_size)
        if blocks > self._free:
            raise OutOfBlocksError(f"{owner} needs {blocks} blocks and {self._free} are free")
        self._free -= blocks
        return blocks

    def _drop(self, grant: _Grant) -> None:
        grant.holds -= 1
        if grant.holds == 0:
            self._free += grant.blocks
