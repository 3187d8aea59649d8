"""Decode side of hand-offs: grants leases on blocks, into which prefill instances write KV caches."""

from mypy_extensions import mypyc_attr

from twofold.handoff import Lease
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator, LeaseTable
from twofold.request import Request
from twofold.scheduling.instance.sequence import KvReservation, ScheduledSequence, SequenceQueue
from twofold.scheduling.instance.swap_preemption import SwapPreemption


@mypyc_attr(allow_interpreted_subclasses=True)
class KvReceiver:
    """Grants leases (rights to write a request's KV into blocks) to prefill instances, and tracks their transfers."""

    def __init__(
        self, blocks: BlockAllocator, leases: LeaseTable, reservation: KvReservation, swap: SwapPreemption | None
    ) -> None:
        self.blocks = blocks
        self.leases = leases
        self.reservation = reservation if swap is None else swap.reservation
        self.swap = swap
        self.sequences: dict[str, ScheduledSequence] = {}
        self.lease_queue = SequenceQueue()  # waiting for a lease
        self.arriving = SequenceQueue()  # with a lease, but incomplete KV
        self.pulls: dict[str, BlockAllocation] = {}  # blocks that this instance is filling by a pull, by request

    def reserve(self, request: Request, source: str) -> None:
        """Add a request to the lease queue; a later call of `grant` returns its lease."""
        self.lease_queue.append(self._expect(request, source))

    def grant(self, now: float) -> list[Lease]:
        """Grant leases on free blocks to waiting requests in queue order. Return the list of granted leases.

        Call this method after a request was queued or blocks were freed.
        """
        granted: list[Lease] = []
        queue = self.lease_queue
        while (sequence := queue.first) is not None and self._can_lease(sequence):
            queue.remove(sequence)
            granted.append(self._lease(sequence, now))
            if not queue.size:  # prompts for hand-off may start again
                self.blocks_freed()
        return granted

    def lease_now(self, request: Request, source: str, now: float) -> Lease | None:
        """Grant a request a lease ahead of the queue; return None if too few blocks are free."""
        sequence = self._expect(request, source)
        if self._can_lease(sequence):
            return self._lease(sequence, now)
        del self.sequences[sequence.id]
        return None

    def kv_received(self, request_id: str, epoch: int) -> bool:
        """Record that a request's KV has arrived; return True if the request can now decode."""
        self.leases.end(request_id, epoch)
        return self._arrived(request_id)

    def end_lease(self, request_id: str, epoch: int) -> None:
        """End the lease of a request whose KV has not arrived completely."""
        if self.leases.end(request_id, epoch):  # the prefill instance gave up or failed
            self.blocks_freed()

    def read_started(self, request_id: str, epoch: int) -> bool:
        """Record that this instance starts to read a request's KV; return False if the KV is not needed."""
        sequence = self.sequences.get(request_id)
        reads = sequence is not None and sequence.queue is self.arriving
        if sequence is not None and reads:
            allocation = self.pulls[request_id] = allocation_of(sequence)
            self.blocks.begin_transfer(allocation)  # until `read_ended`
        self.end_lease(request_id, epoch)
        return reads

    def read_ended(self, request_id: str, *, complete: bool) -> bool:
        """Record that reading a request's KV has ended; return True if the request can now decode."""
        self.blocks.end_transfer(self.pulls.pop(request_id))
        if complete:
            return self._arrived(request_id)
        self.blocks_freed()
        return False

    def peer_lost(self, source: str) -> list[str]:
        """End all leases that let the failed instance `source` write KV; return the ids of affected requests."""
        # The caller must abort those of the requests that hold blocks.
        queued = [sequence for sequence in self.lease_queue if sequence.source == source]
        for sequence in queued:
            self.lease_queue.remove(sequence)
            del self.sequences[sequence.id]
        leased = [lease.request_id for lease in self.leases.held_by(source)]
        for request_id in leased:
            self.leases.end(request_id, self.leases.epoch)
        self.blocks_freed()
        return [sequence.id for sequence in queued] + leased

    def add(self, sequence: ScheduledSequence) -> None:
        """Register a sequence and compute its KV reservation. Raises ValueError for a duplicate id."""
        request_id, output, reservation = sequence.id, sequence.output_tokens, self.reservation
        if self.sequences.setdefault(request_id, sequence) is not sequence:
            raise ValueError(f"request {request_id} is already here")
        sequence.start_tokens = reservation.at_start(sequence.prompt_tokens, output, sequence.decodes_here)
        if sequence.decodes_here:
            sequence.decode_tokens = reservation.at_decode_start(output)

    def enqueue_ready(self, sequence: ScheduledSequence) -> None:
        """Add a sequence to the decode queue after its whole KV has arrived."""
        raise NotImplementedError

    def blocks_freed(self) -> None:
        """Hook: blocks were freed, so waiting sequences may be able to start."""
        raise NotImplementedError

    def _expect(self, request: Request, source: str) -> ScheduledSequence:
        """Register a request that will decode on this instance after its prefill on `source`."""
        sequence = ScheduledSequence(request, decodes_here=True, generated=1)
        sequence.computed = sequence.prompt_tokens
        sequence.source = source
        self.add(sequence)
        return sequence

    def _can_lease(self, sequence: ScheduledSequence) -> bool:
        swap = self.swap
        return self.blocks.fits(sequence.start_tokens) and (swap is None or swap.can_admit(sequence))

    def _lease(self, sequence: ScheduledSequence, now: float) -> Lease:
        # The instance may have the KV of earlier turns: these blocks are not sent again.
        keys = sequence.request.prefix_blocks[: sequence.prompt_tokens // self.blocks.block_size]
        allocation, cached = self.blocks.allocate_after(sequence.id, sequence.start_tokens, keys)
        sequence.allocation = allocation
        if self.swap is not None:
            self.swap.admit(sequence)
        self.arriving.append(sequence)
        return self.leases.grant(allocation, sequence.source, now, cached)

    def _arrived(self, request_id: str) -> bool:
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.queue is not self.arriving:
            self.blocks_freed()
            return False
        self.arriving.remove(sequence)
        self.enqueue_ready(sequence)
        return True


def allocation_of(sequence: ScheduledSequence) -> BlockAllocation:
    """Return the blocks of a sequence. Raises KeyError if it has none."""
    allocation = sequence.allocation
    if allocation is None:
        raise KeyError(f"request {sequence.id} has no blocks")
    return allocation
