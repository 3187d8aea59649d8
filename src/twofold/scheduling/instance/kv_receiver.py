"""The decode side of hand-offs: leases on blocks, and the KV caches that arrive in them."""

from mypy_extensions import mypyc_attr

from twofold.handoff import Lease
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator, LeaseTable
from twofold.request import Request
from twofold.scheduling.instance.sequence import KvReservation, ScheduledSequence, SequenceQueue
from twofold.scheduling.instance.swap_preemption import SwapPreemption


@mypyc_attr(allow_interpreted_subclasses=True)
class KvReceiver:
    """Grants leases to prefill instances and tracks their transfers until a sequence can decode.

    `sequences` maps request ids to all sequences of this instance. `lease_queue` has the requests that wait for a
    lease, in order. `arriving` has the requests with a lease and an incomplete KV cache.
    """

    def __init__(
        self, blocks: BlockAllocator, leases: LeaseTable, reservation: KvReservation, swap: SwapPreemption | None
    ) -> None:
        self.blocks = blocks
        self.leases = leases
        self.reservation = reservation if swap is None else swap.reservation
        self.swap = swap
        self.sequences: dict[str, ScheduledSequence] = {}
        self.lease_queue = SequenceQueue()
        self.arriving = SequenceQueue()
        self.pulls: dict[str, BlockAllocation] = {}  # blocks that this instance fills itself, by request

    def reserve(self, request: Request, source: str) -> None:
        """Queue a request that is prefilled on `source` for a lease. A later `grant` returns the lease."""
        self.lease_queue.append(self._expect(request, source))

    def grant(self, now: float) -> list[Lease]:
        """Grant and return leases in the order of the queue while blocks are free.

        Call this after every command and completed batch, since each may queue a request or free blocks.
        """
        granted: list[Lease] = []
        queue = self.lease_queue
        while (sequence := queue.first) is not None and self._can_lease(sequence):
            queue.remove(sequence)
            granted.append(self._lease(sequence, now))
            if not queue.size:
                self.blocks_freed()
        return granted

    def lease_now(self, request: Request, source: str, now: float) -> Lease | None:
        """Grant a lease ahead of the queue. With too few free blocks, change nothing and return None."""
        sequence = self._expect(request, source)
        if self._can_lease(sequence):
            return self._lease(sequence, now)
        del self.sequences[sequence.id]
        return None

    def kv_received(self, request_id: str, epoch: int) -> bool:
        """End the lease of a request with a complete KV cache; True if the request is now ready to decode."""
        self.leases.end(request_id, epoch)
        return self._arrived(request_id)

    def end_lease(self, request_id: str, epoch: int) -> None:
        """End the lease of a request with an incomplete KV cache, because the source gave up or died."""
        if self.leases.end(request_id, epoch):
            self.blocks_freed()

    def read_started(self, request_id: str, epoch: int) -> bool:
        """End the lease of a request because this instance pulls the KV cache of that request itself.

        The blocks stay held until `read_ended`, even if the request is aborted. Returns False for an unknown request;
        its KV cache must not be read.
        """
        sequence = self.sequences.get(request_id)
        reads = sequence is not None and sequence.queue is self.arriving
        if sequence is not None and reads:
            allocation = self.pulls[request_id] = allocation_of(sequence)
            self.blocks.begin_transfer(allocation)
        self.end_lease(request_id, epoch)
        return reads

    def read_ended(self, request_id: str, *, complete: bool) -> bool:
        """End the pull of a KV cache; True if its request is now ready to decode."""
        self.blocks.end_transfer(self.pulls.pop(request_id))
        if complete:
            return self._arrived(request_id)
        self.blocks_freed()
        return False

    def peer_lost(self, source: str) -> list[str]:
        """End the leases of a dead instance and drop its queued reservations.

        Returns the affected requests. Requests that have blocks keep them until they are aborted.
        """
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
        """Register a sequence and compute its KV reservation; raises ValueError for a duplicate id."""
        request_id, output, reservation = sequence.id, sequence.output_tokens, self.reservation
        if self.sequences.setdefault(request_id, sequence) is not sequence:
            raise ValueError(f"request {request_id} is already here")
        sequence.start_tokens = reservation.at_start(sequence.prompt_tokens, output, sequence.decodes_here)
        if sequence.decodes_here:
            sequence.decode_tokens = reservation.at_decode_start(output)

    def enqueue_ready(self, sequence: ScheduledSequence) -> None:
        """Add a sequence with a complete KV cache to the sequences that are ready to decode."""
        raise NotImplementedError

    def blocks_freed(self) -> None:
        """Check the waiting sequences again after blocks were freed or the last pending lease was granted."""
        raise NotImplementedError

    def _expect(self, request: Request, source: str) -> ScheduledSequence:
        """Register a request that is prefilled on `source` and will decode on this instance."""
        sequence = ScheduledSequence(request, decodes_here=True, computed=request.prompt_tokens, generated=1)
        sequence.source = source
        self.add(sequence)
        return sequence

    def _can_lease(self, sequence: ScheduledSequence) -> bool:
        swap = self.swap
        return self.blocks.fits(sequence.start_tokens) and (swap is None or swap.can_admit(sequence))

    def _lease(self, sequence: ScheduledSequence, now: float) -> Lease:
        sequence.allocation = allocation = self.blocks.allocate(sequence.id, sequence.start_tokens)
        if self.swap is not None:
            self.swap.admit(sequence)
        self.arriving.append(sequence)
        return self.leases.grant(allocation, sequence.source, now)

    def _arrived(self, request_id: str) -> bool:
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.queue is not self.arriving:
            self.blocks_freed()
            return False
        self.arriving.remove(sequence)
        self.enqueue_ready(sequence)
        return True


def allocation_of(sequence: ScheduledSequence) -> BlockAllocation:
    """Return the allocation of a request; raises KeyError if it has none."""
    allocation = sequence.allocation
    if allocation is None:
        raise KeyError(f"request {sequence.id} has no blocks")
    return allocation
