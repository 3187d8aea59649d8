"""Interface of batchers, which select the sequences of the next batch of an instance."""

from abc import ABC, abstractmethod
from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.paged import PrefixBlockAllocator
from twofold.scheduling.instance.queues import Queues, RunningBatch, SchedulerOutput
from twofold.scheduling.instance.sequence import PrefillChunk, ScheduledSequence, SequenceQueue
from twofold.scheduling.instance.swap_preemption import SwapPreemption


@mypyc_attr(free_list_len=1)
class SchedulingBudget:
    """Budget for one batch: the KV blocks and sequence slots that a batcher can still assign to sequences."""

    def __init__(self, blocks: BlockAllocator, free_blocks: int, free_seats: int, leases_first: bool = False) -> None:
        self.blocks = blocks
        self.free_blocks = free_blocks
        self.free_seats = free_seats
        # Set while requests wait for a lease on this instance's blocks. Prompts that will be handed off are then not
        # admitted: two instances that prefill for each other could fill up with KV that neither can send.
        self.leases_first = leases_first
        self.swap: SwapPreemption | None = None
        self.shared: PrefixBlockAllocator | None = None  # with a prefix cache

    def prefill_tokens(self, sequence: ScheduledSequence) -> int:
        """Return the number of prompt tokens that a sequence still has to compute. Call this before `admit`."""
        if self.shared is not None and sequence.allocation is None:
            keys = sequence.request.prefix_blocks
            sequence.computed = self.shared.reusable_tokens(keys, sequence.prompt_tokens)
        return sequence.prefill_remaining

    def admit(self, sequence: ScheduledSequence) -> bool:
        """Reserve blocks and a slot for a waiting sequence; return False if there are too few."""
        shared = self.shared
        if shared is None:
            needed = self.blocks.blocks_for(sequence.start_tokens)
        else:
            keys = sequence.request.prefix_blocks
            needed = shared.blocks_taken(sequence.start_tokens, keys, sequence.prompt_tokens)
        if self.free_seats < 1 or needed > self.free_blocks:
            return False
        if self.leases_first and not sequence.decodes_here:
            return False
        if self.swap is not None and not self.swap.offer(sequence):
            return False
        self.free_seats -= 1
        self.free_blocks -= needed
        if shared is not None:
            # Allocated immediately, so that the cached prefix is not evicted.
            found = shared.allocate_prompt(sequence.id, sequence.start_tokens, keys, sequence.prompt_tokens)
            sequence.allocation, sequence.copy = found.grant, found.copy
            sequence.computed = sequence.reused_tokens = found.tokens
        return True

    def admit_decode(self, sequence: ScheduledSequence) -> bool:
        """Reserve the output blocks of a sequence that is ready to decode; return False if too few are free."""
        if sequence.decode_tokens == 0:
            return True
        needed = self.blocks.blocks_for(sequence.decode_tokens)
        if needed > self.free_blocks:
            return False
        self.free_blocks -= needed
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class Batcher(ABC):
    """Base class of batchers, which select the sequences of each batch."""

    # A batcher changes only the budget and its own state. A batch of decodes repeats until a sequence ends or
    # `should_reschedule` returns True.

    # Traits, against which configurations are checked.
    prefills: ClassVar[bool] = True  # selects prompts
    decodes: ClassVar[bool] = True  # selects decodes
    whole_prompts: ClassVar[bool] = False  # fills the token budget with whole prompts, in order
    cuts_prompts: ClassVar[bool] = False  # computes at most the token budget of a prompt at a time
    chunked: ClassVar[bool] = False  # cuts prompts into chunks that a pipeline may run concurrently
    may_preempt: ClassVar[bool] = False  # preempts decodes, which excludes swap preemption
    reuses_prefix: ClassVar[bool] = True  # skips prompt tokens found in the prefix cache
    live_token_budget: ClassVar[int] = 2048  # default of `max_num_batched_tokens` in a live service
    pipelined: ClassVar[bool] = True  # can select for several concurrent batches of an instance

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs

    # Out of queue order, small requests could starve a large request.
    @abstractmethod
    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        """Select the next batch: waiting ones in queue order (`budget.admit`), ready ones (`budget.admit_decode`)."""

    def on_queued(self, sequence: ScheduledSequence) -> None:  # noqa: B027  (a hook, not an obligation)
        """Hook: a sequence was queued for prefill or decode."""

    def on_finished(self, sequence: ScheduledSequence) -> None:  # noqa: B027  (a hook)
        """Hook: a sequence finished, was aborted, or will continue on another instance."""

    def num_queued(self, queues: Queues) -> int:
        """Return the number of sequences outside the running batch, as a load measure for routers."""
        return queues.waiting.size + queues.ready.size + queues.paused.size

    def should_reschedule(
        self, sequence: ScheduledSequence | None, running: RunningBatch | None, blocks: BlockAllocator
    ) -> bool:
        """Return whether to select a new batch. Called when a sequence is queued or KV blocks are freed."""
        return True  # `sequence` is None after blocks were freed


def select_prompts(waiting: SequenceQueue, budget: SchedulingBudget, tokens: int, seqs: int) -> list[PrefillChunk]:
    """Select whole prompts in order: at most `seqs` prompts and `tokens` tokens, or one longer prompt alone."""
    chunks: list[PrefillChunk] = []
    sequence = waiting.first
    while sequence is not None:
        remaining = budget.prefill_tokens(sequence)
        fits = remaining <= tokens or not chunks
        if not fits or len(chunks) >= seqs or not budget.admit(sequence):
            break
        chunks.append(sequence.prefill(remaining))
        tokens -= remaining
        sequence = sequence.next
    return chunks


def select_ready(ready: SequenceQueue, budget: SchedulingBudget, seqs: int) -> list[ScheduledSequence]:
    """Select up to `seqs` sequences that are ready to decode, in queue order, while blocks are free."""
    chosen: list[ScheduledSequence] = []
    sequence = ready.first
    while sequence is not None and len(chosen) < seqs and budget.admit_decode(sequence):
        chosen.append(sequence)
        sequence = sequence.next
    return chosen


def select_fairly(queues: Queues, budget: SchedulingBudget, most: int) -> list[ScheduledSequence]:
    """Select sequences that are ready to decode, so that at most `most` sequences run.

    A started prompt keeps its slot, and the first waiting one has a slot before decodes that arrived later: hand-offs
    that do not cease would let it starve.
    """
    seats = most - queues.decoding.size - queues.prefilling.size
    prompt, ready = queues.waiting.first, queues.ready.first
    if prompt is not None and ready is not None and prompt.request.arrival_s < ready.request.arrival_s:
        seats -= 1
        budget.free_seats = max(1, budget.free_seats)
    return select_ready(queues.ready, budget, seats)
