"""The batcher seam: which work goes into the next iteration of an instance?"""

from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr

from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.paged import PrefixBlockAllocator
from twofold.scheduling.instance.batch import RunningBatch
from twofold.scheduling.instance.queues import Queues
from twofold.scheduling.instance.sequence import PrefillChunk, ScheduledSequence, SequenceQueue
from twofold.scheduling.instance.swap_preemption import SwapPreemption


@mypyc_attr(free_list_len=1)
class SchedulingBudget:
    """What is left for sequences that want more: blocks of the cache, and seats in the running set.

    While a lease is waited for here (`leases_first`), prompts that will be handed off do not start. Two instances
    that prefill for each other could otherwise fill up with KV caches that each wants to send to the other. Where
    memory grows, `growth` has a say in who begins. Where prompts find what others have computed, in `shared` memory,
    they are given it as soon as they are chosen: it may not go to make room for those that are chosen after them.
    """

    __slots__ = ("blocks", "free_blocks", "free_seats", "growth", "leases_first", "shared")

    def __init__(
        self,
        blocks: BlockAllocator,
        free_blocks: int,
        free_seats: int,
        leases_first: bool = False,
        growth: SwapPreemption | None = None,
        shared: PrefixBlockAllocator | None = None,
    ) -> None:
        self.blocks = blocks
        self.free_blocks = free_blocks
        self.free_seats = free_seats
        self.leases_first = leases_first
        self.growth = growth
        self.shared = shared

    def remaining(self, sequence: ScheduledSequence) -> int:
        """Prompt tokens that a sequence has to compute, were it to start now if it waits; to be asked before `take`."""
        if self.shared is not None and sequence.grant is None:
            keys = sequence.request.prefix_blocks
            sequence.computed = self.shared.reusable_tokens(keys, sequence.prompt_tokens)
        return sequence.prefill_remaining

    def take(self, sequence: ScheduledSequence) -> bool:
        """Set room aside for a waiting sequence; False, and nothing taken, when there is not enough."""
        shared, keys = self.shared, sequence.request.prefix_blocks
        if shared is None:
            needed = self.blocks.blocks_for(sequence.start_tokens)
        else:
            needed = shared.blocks_taken(sequence.start_tokens, keys, sequence.prompt_tokens)
        if self.free_seats < 1 or needed > self.free_blocks:
            return False
        if self.leases_first and not sequence.decodes_here:
            return False
        if self.growth is not None and not self.growth.take(sequence):
            return False
        self.free_seats -= 1
        self.free_blocks -= needed
        if shared is not None:
            found = shared.allocate_prompt(sequence.id, sequence.start_tokens, keys, sequence.prompt_tokens)
            sequence.grant, sequence.copy = found.grant, found.copy
            sequence.computed = sequence.reused_tokens = found.tokens
        return True

    def take_output(self, sequence: ScheduledSequence) -> bool:
        """Set memory aside for the output of a ready sequence, where it was not taken at the start."""
        if sequence.decode_tokens == 0:
            return True
        needed = self.blocks.blocks_for(sequence.decode_tokens)
        if needed > self.free_blocks:
            return False
        self.free_blocks -= needed
        return True


@mypyc_attr(free_list_len=1)
class SchedulerOutput:
    """What changes with the next iteration: prompt work, sequences that begin or resume decoding, and decodes
    that pause. Every other member of the decode set goes on. `stands` False asks for another selection right after
    it, because whoever was left out of this one is to have a turn."""

    __slots__ = ("pause", "prefills", "resume", "stands")

    def __init__(
        self, prefills: list[PrefillChunk] | None = None, resume: list[ScheduledSequence] | None = None
    ) -> None:
        self.prefills: list[PrefillChunk] = [] if prefills is None else prefills
        self.resume: list[ScheduledSequence] = [] if resume is None else resume
        self.pause: list[ScheduledSequence] = []
        self.stands = True


@mypyc_attr(allow_interpreted_subclasses=True)
class Batcher(ABC):
    """Picks the work of the next iterations; it changes nothing but `room` and notes of its own.

    A selection stands until a sequence in it ends or a prompt in it is done: iterations of decodes only run on
    without asking again, unless something happens meanwhile that `reselects`.
    """

    @abstractmethod
    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        """Waiting sequences are started in their order only, each after `room.take` said yes, so that a large
        request is never starved by small ones behind it; ready ones after `room.take_output` did."""
        ...

    @abstractmethod
    def queued(self, sequence: ScheduledSequence) -> None:
        """A sequence came to wait for prefill (nothing of it is generated), or is ready for decode."""
        ...

    @abstractmethod
    def gone(self, sequence: ScheduledSequence) -> None:
        """A sequence that was queued has ended here, or goes on elsewhere."""
        ...

    def waiting(self, queues: Queues) -> int:
        """How many sequences are here and not in the iteration that runs: what a router may ask."""
        return queues.waiting.size + queues.ready.size + queues.paused.size

    @abstractmethod
    def should_reschedule(
        self, sequence: ScheduledSequence | None, running: RunningBatch | None, blocks: BlockAllocator
    ) -> bool:
        """Whether to select anew at the next boundary, after `sequence` was queued or (None) blocks became free.
        `running` is the iteration under way, if any."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class EagerBatcher(Batcher):
    """Notes nothing: whatever happens may change the next iteration."""

    def queued(self, sequence: ScheduledSequence) -> None:
        pass

    def gone(self, sequence: ScheduledSequence) -> None:
        pass

    def should_reschedule(
        self, sequence: ScheduledSequence | None, running: RunningBatch | None, blocks: BlockAllocator
    ) -> bool:
        return True


def take_prompts(
    waiting: SequenceQueue,
    room: SchedulingBudget,
    max_num_batched_tokens: int,
    *,
    max_prompts: int,
    longer_runs_alone: bool,
) -> list[PrefillChunk]:
    """Whole prompts, first come first, up to `max_num_batched_tokens` tokens; the first may exceed it if it
    runs alone.
    """
    items: list[PrefillChunk] = []
    sequence = waiting.first
    while sequence is not None:
        tokens = room.remaining(sequence)
        fits = tokens <= max_num_batched_tokens or (longer_runs_alone and not items)
        if not fits or len(items) >= max_prompts or not room.take(sequence):
            break
        items.append(sequence.prefill(tokens))
        max_num_batched_tokens -= tokens
        sequence = sequence.after
    return items


def take_ready(ready: SequenceQueue, room: SchedulingBudget, seats: int) -> list[ScheduledSequence]:
    """Sequences that may begin to decode, first come first, as far as `seats` and memory go."""
    chosen: list[ScheduledSequence] = []
    sequence = ready.first
    while sequence is not None and len(chosen) < seats and room.take_output(sequence):
        chosen.append(sequence)
        sequence = sequence.after
    return chosen
