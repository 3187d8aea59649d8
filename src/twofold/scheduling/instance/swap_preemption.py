"""Swap preemption: if no KV block is free for a decode, sequences are swapped out to host memory.

A sequence starts with KV blocks for its prompt and 64 output tokens by default, and grows by the same number of
tokens. The sequences admitted last are swapped out first (as in DistServe's runtime). Swapped-out sequences return
in order of admission, before new sequences start (docs/decisions/0014).
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.kvcache.allocator import BlockAllocation, BlockAllocator
from twofold.scheduling.instance.queues import Queues
from twofold.scheduling.instance.sequence import KvReservation, ScheduledSequence

STEP_TOKENS: Final = 64
_admission: Final = attrgetter("admission")


@mypyc_attr(free_list_len=1)
class BlockCopy:
    """Command to copy the first KV blocks of a sequence from device to host memory, or back."""

    def __init__(self, out: bool, blocks: int, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self.out = out
        self.blocks = blocks
        # Empty if the allocators only count blocks.
        self.device_blocks = tuple(device_blocks[:blocks])
        self.host_blocks = tuple(host_blocks)


class SwapPreemption:
    """Swaps the KV blocks of one instance's sequences out to host memory and back. The caller must execute
    the pending block copies in the list `copies`, in order, before the next batch.
    """

    def __init__(self, blocks: BlockAllocator, host: BlockAllocator, step_tokens: int = STEP_TOKENS) -> None:
        if step_tokens < 1:
            raise ValueError("a step must have at least one token")
        self.reservation = KvReservation(step=step_tokens)
        self.blocks = blocks
        self.host = host
        self.queues = Queues()
        self.copies: list[BlockCopy] = []
        self.swapped = 0  # sequences on the host
        self.swaps = 0  # swap-outs so far
        self.blocks_copied = 0
        self._step = step_tokens
        self._admitted = 0
        # Host blocks reserved at admission for the full length of sequences, so that swapping out cannot fail.
        self._promised = 0
        self._offered = 0  # host blocks reserved for prompts of the selection in progress
        self._returning: list[BlockAllocation] = []

    def can_admit(self, sequence: ScheduledSequence) -> bool:
        """Whether a sequence may start: no sequence is paused, and enough device and host blocks are free."""
        if self.queues.paused.size:
            return False
        needed = self.blocks.blocks_for(sequence.start_tokens) + self._headroom()
        return needed <= self.blocks.num_free and self._promised + self._full_blocks(sequence) <= self.host.num_blocks

    def begin_selection(self) -> int:
        """Prepare for selecting a batch; return the number of free blocks for new prompts."""
        self._offered = 0
        return 0 if self.queues.paused.size else max(0, self.blocks.num_free - self._headroom())

    def offer(self, sequence: ScheduledSequence) -> bool:
        """Reserve host blocks for a prompt that the batcher selected to run; return False if too few are left."""
        if not sequence.decodes_here:
            return True
        if self._promised + self._offered + self._full_blocks(sequence) > self.host.num_blocks:
            return False
        self._offered += self._full_blocks(sequence)
        return True

    def admit(self, sequence: ScheduledSequence) -> None:
        """Record the admission of a sequence that will decode on this instance."""
        self._admitted += 1
        sequence.admission = self._admitted
        self._promised += self._full_blocks(sequence)

    def forget(self, sequence: ScheduledSequence) -> None:
        """Release all host blocks of an ended sequence."""
        if sequence.admission:
            sequence.admission = 0
            self._promised -= self._full_blocks(sequence)
        if sequence.swapped is not None:
            self._free_host(sequence, sequence.swapped)

    def iterations_left(self, sequence: ScheduledSequence) -> int:
        """Return how many decode iterations still fit in a sequence's allocated KV blocks."""
        allocation = sequence.allocation  # of a sequence that is not decoding
        return 0 if allocation is None else allocation.blocks * self.blocks.block_size - sequence.computed

    def extend(self, sequence: ScheduledSequence) -> bool:
        """Allocate blocks for a sequence's next output tokens; return False if too few are free."""
        allocation, tokens = sequence.allocation, self._step_of(sequence)
        if allocation is None or not self.blocks.fits(tokens):
            return False
        self.blocks.extend(allocation, tokens)
        return True

    def resume_paused(self) -> list[ScheduledSequence]:
        """Resume as many paused sequences as KV blocks allow, in order of admission.

        To make room for a paused sequence, swap out sequences admitted later. Return the swapped-out sequences that
        were decoding.
        """
        # Called between batches. The oldest sequence always progresses, so all finish.
        queues = self.queues
        preempted: list[ScheduledSequence] = []
        resumed: list[ScheduledSequence] = []
        paused = sorted(queues.paused, key=_admission)
        for sequence in paused:
            if sequence.allocation is not None:
                if not self._make_room(sequence, preempted):
                    break
                self.extend(sequence)
                resumed.append(sequence)
        else:
            if not self.copies:
                self._swap_in(paused, resumed)
        for sequence in reversed(resumed):
            queues.paused.remove(sequence)
            queues.ready.prepend(sequence)
        return preempted

    def take_copies(self) -> list[BlockCopy]:
        """Remove and return the pending block copies, which the caller must carry out before the new batch runs."""
        copies, self.copies = self.copies, []
        return copies

    def batch_ended(self) -> None:
        """Record the end of a batch."""
        for allocation in self._returning:  # blocks swapped in before this batch are no longer in flight
            self.blocks.end_transfer(allocation)
        self._returning.clear()

    def _make_room(self, sequence: ScheduledSequence, preempted: list[ScheduledSequence]) -> bool:
        """Free blocks for the next output tokens of `sequence` by swapping out sequences admitted later. Return
        False if swapping cannot free enough blocks.
        """
        needed, free = self.blocks.blocks_for(self._step_of(sequence)), self.blocks.num_free
        if needed <= free:
            return True
        queues = self.queues
        later = [
            other
            for queue in (queues.decoding, queues.ready, queues.paused)
            for other in queue
            # Blocks in a transfer stay where they are.
            if other.admission > sequence.admission and other.allocation is not None and not other.allocation.transfers
        ]
        later.sort(key=_admission, reverse=True)
        victims: list[ScheduledSequence] = []
        allocations: list[BlockAllocation] = []
        for other in later:
            if free >= needed:
                break
            victims.append(other)
            if other.allocation is not None:
                allocations.append(other.allocation)
            free = self.blocks.num_free + self.blocks.freed_by(allocations)
        if free < needed:
            return False
        for other in victims:
            self._swap_out(other, preempted)
        return True

    def _swap_out(self, sequence: ScheduledSequence, preempted: list[ScheduledSequence]) -> None:
        queues = self.queues
        if sequence.queue is queues.decoding:
            queues.decoding.remove(sequence)
            queues.paused.append(sequence)
            preempted.append(sequence)
        elif sequence.queue is queues.ready:
            queues.ready.remove(sequence)
            queues.paused.append(sequence)
        device = sequence.allocation
        assert device is not None  # noqa: S101  (victims have blocks; for the type checker)
        host = sequence.swapped = self.host.allocate(sequence.id, sequence.computed)
        self._copy(True, device, host)
        self.blocks.release(device)  # at once: only the next batch, after the copy, can allocate these blocks
        sequence.allocation = None
        self.swapped += 1
        self.swaps += 1

    def _swap_in(self, paused: list[ScheduledSequence], resumed: list[ScheduledSequence]) -> None:
        """Swap in sequences in order of admission while enough blocks are free."""
        for sequence in paused:
            host = sequence.swapped
            if host is None:
                continue
            tokens = sequence.computed + self._step_of(sequence)
            # All running sequences keep blocks for their next tokens.
            headroom = self._headroom() + len(resumed) * self.blocks.blocks_for(self._step)
            if self.blocks.blocks_for(tokens) + headroom > self.blocks.num_free:
                return
            device = sequence.allocation = self.blocks.allocate(sequence.id, tokens)
            self._copy(False, device, host)
            self.blocks.begin_transfer(device)
            self._returning.append(device)
            self._free_host(sequence, host)
            resumed.append(sequence)

    def _free_host(self, sequence: ScheduledSequence, host: BlockAllocation) -> None:
        self.host.release(host)
        sequence.swapped = None
        self.swapped -= 1

    def _copy(self, out: bool, device: BlockAllocation, host: BlockAllocation) -> None:
        self.copies.append(BlockCopy(out, host.blocks, self.blocks.blocks_of(device), self.host.blocks_of(host)))
        self.blocks_copied += host.blocks

    def _step_of(self, sequence: ScheduledSequence) -> int:
        """Return the number of tokens that a sequence's next allocation of KV blocks must hold."""
        full = sequence.prompt_tokens + sequence.output_tokens - 1  # the last output token needs no KV
        return min(self._step, full - sequence.computed)

    def _full_blocks(self, sequence: ScheduledSequence) -> int:
        """Return the number of blocks that a sequence needs for its prompt and its whole output."""
        return self.blocks.blocks_for(sequence.prompt_tokens + sequence.output_tokens - 1)

    def _headroom(self) -> int:
        """Return the number of blocks that all running sequences need for their next output tokens."""
        return (self.queues.decoding.size + self.queues.ready.size) * self.blocks.blocks_for(self._step)
