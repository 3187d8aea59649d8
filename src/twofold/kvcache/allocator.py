"""Allocation of KV cache blocks to requests, and leases that allow peer instances to write to allocated blocks."""

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from twofold.errors import OutOfBlocksError, StaleEpochError
from twofold.handoff import Lease, LeaseWatcher
from twofold.request import BlockKey


@mypyc_attr(acyclic=True, free_list_len=1)
class BlockAllocation:
    """Blocks that are allocated to one owner."""

    __slots__ = ("blocks", "owned", "owner", "transfers")

    def __init__(self, owner: str, blocks: int) -> None:
        self.owner = owner
        self.blocks = blocks
        # The blocks become free when the owner has released them and no transfer may access them.
        self.owned = True
        self.transfers = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockAllocator:
    """Counts the free blocks of a KV cache, without block ids."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a block allocator needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self.num_in_flight = 0  # blocks in transfer

    def blocks_of(self, allocation: BlockAllocation) -> Sequence[int]:
        """Return the block ids of an allocation in token order, or () if the allocator only counts blocks."""
        return ()

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks needed for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def fits(self, tokens: int) -> bool:
        """Whether `tokens` tokens fit in the free blocks."""
        return -(-tokens // self.block_size) <= self.num_free

    def allocate(self, owner: str, tokens: int) -> BlockAllocation:
        """Allocate blocks for `tokens` tokens. If too few are free, raise OutOfBlocksError and change nothing."""
        allocation = BlockAllocation(owner, 0)
        self.extend(allocation, tokens)
        return allocation

    def allocate_after(self, owner: str, tokens: int, keys: Sequence[BlockKey]) -> tuple[BlockAllocation, int]:
        """Allocate blocks for `tokens` tokens; the leading blocks have the keys `keys`, and are shared if cached.

        Return the allocation and its number of cached blocks. Raises OutOfBlocksError if too few blocks are free.
        """
        return self.allocate(owner, tokens), 0

    def extend(self, allocation: BlockAllocation, tokens: int) -> None:
        """Add blocks for `tokens` tokens to an allocation, or raise OutOfBlocksError and change nothing."""
        blocks = -(-tokens // self.block_size)
        if blocks > self.num_free:
            raise OutOfBlocksError(f"{allocation.owner} needs {blocks} blocks and {self.num_free} are free")
        self._assign(allocation, blocks)
        self.num_free -= blocks
        allocation.blocks += blocks
        if allocation.transfers:
            self.num_in_flight += blocks

    def release(self, allocation: BlockAllocation) -> None:
        """Release an owner's blocks, which become free when no transfer uses them."""
        if not allocation.owned:
            raise ValueError(f"{allocation.owner} has already released these blocks")
        allocation.owned = False
        if not allocation.transfers:
            self._free(allocation)

    def freed_by(self, allocations: Sequence[BlockAllocation]) -> int:
        """Return how many blocks would become free if these allocations were released."""
        blocks = 0
        for allocation in allocations:
            blocks += allocation.blocks  # assuming that no transfer uses them
        return blocks

    def begin_transfer(self, allocation: BlockAllocation) -> None:
        """Record the start of a transfer that may access the blocks of an allocation."""
        if not allocation.owned:
            raise ValueError(f"{allocation.owner} has already released these blocks")
        allocation.transfers += 1
        if allocation.transfers == 1:
            self.num_in_flight += allocation.blocks

    def end_transfer(self, allocation: BlockAllocation) -> None:
        """Record the end of a transfer, and free the blocks if nothing else uses them."""
        if not allocation.transfers:
            raise ValueError(f"no transfer of the blocks of {allocation.owner} is in flight")
        allocation.transfers -= 1
        if not allocation.transfers:
            self.num_in_flight -= allocation.blocks
            if not allocation.owned:
                self._free(allocation)

    def _assign(self, allocation: BlockAllocation, blocks: int) -> None:
        """Hook for subclasses: assign block ids to the new blocks of an allocation, of which there are `blocks`."""

    def _free(self, allocation: BlockAllocation) -> None:
        self.num_free += allocation.blocks


@mypyc_attr(acyclic=True, free_list_len=1)
class _Term:
    """A lease with its deadline for the next heartbeat."""

    __slots__ = ("deadline", "expired", "grant", "lease")

    def __init__(self, lease: Lease, grant: BlockAllocation, deadline: float) -> None:
        self.lease = lease
        self.grant = grant
        self.deadline = deadline
        self.expired = False


class LeaseTable:
    """Leases that allow peer instances to write to KV cache blocks of one instance."""

    def __init__(
        self, blocks: BlockAllocator, instance: str, epoch: int, lease_s: float, watcher: LeaseWatcher | None = None
    ) -> None:
        self._blocks = blocks
        self._watcher = watcher
        self._instance = instance
        self._lease_s = lease_s  # from the last heartbeat of the source to the expiry of its leases
        self._terms: dict[str, _Term] = {}
        self.epoch = epoch

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._terms

    def grant(self, grant: BlockAllocation, source: str, now: float, cached_blocks: int = 0) -> Lease:
        """Lease the blocks of a request, after the cached ones, to instance `source`, which may then write to them."""
        request_id, deadline = grant.owner, now + self._lease_s
        if request_id in self._terms:
            raise ValueError(f"{request_id} already has a lease")
        lease = Lease(
            request_id=request_id,
            source=source,
            instance=self._instance,
            epoch=self.epoch,
            blocks=tuple(self._blocks.blocks_of(grant)[cached_blocks:]),
            cached_blocks=cached_blocks,
            deadline_s=deadline,
        )
        self._blocks.begin_transfer(grant)
        self._terms[request_id] = _Term(lease, grant, deadline)
        if self._watcher is not None:
            self._watcher.granted(lease)
        return lease

    def renew(self, source: str | None, now: float) -> None:
        """Renew the leases held by the peer instance `source`, or every lease if `source` is None."""
        for term in self._terms.values():
            if source is None or term.lease.source == source:
                term.deadline = now + self._lease_s

    def end(self, request_id: str, epoch: int) -> bool:
        """End the lease of a request; return False if it has none. Raises StaleEpochError for an outdated `epoch`."""
        if epoch != self.epoch:
            raise StaleEpochError(f"epoch {epoch} of {self._instance} is over; its epoch is {self.epoch}")
        term = self._terms.get(request_id)
        if term is None:
            return False
        del self._terms[request_id]
        if self._watcher is not None:
            self._watcher.ended(term.lease)
        self._blocks.end_transfer(term.grant)
        return True

    def expired(self, now: float) -> list[Lease]:
        """Return the leases that have expired since the previous call."""
        late = [term for term in self._terms.values() if term.deadline < now and not term.expired]
        for term in late:
            term.expired = True  # the blocks stay in flight until `end`
        return [term.lease for term in late]

    def find(self, request_id: str) -> Lease | None:
        term = self._terms.get(request_id)
        return None if term is None else term.lease

    def held_by(self, source: str) -> list[Lease]:
        return [term.lease for term in self._terms.values() if term.lease.source == source]
