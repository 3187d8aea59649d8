"""The interface of batchers, which choose the sequences in the next batch of an instance."""

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
    """Free blocks and sequence slots for one selection.

    While a lease is pending on this instance (`leases_first`), no prompt starts that will be handed off: two instances
    that prefill for each other could otherwise fill up with KV caches that neither can send.

    The scheduler sets `swap` and `shared`. With `swap`, admission is subject to swap preemption. With `shared`, a
    prompt gets its blocks as soon as it is selected, so that its cached prefix is not evicted for prompts selected
    after it.
    """

    def __init__(self, blocks: BlockAllocator, free_blocks: int, free_seats: int, leases_first: bool = False) -> None:
        self.blocks = blocks
        self.free_blocks = free_blocks
        self.free_seats = free_seats
        self.leases_first = leases_first
        self.swap: SwapPreemption | None = None
        self.shared: PrefixBlockAllocator | None = None

    def prefill_tokens(self, sequence: ScheduledSequence) -> int:
        """Return how many prompt tokens a sequence still has to compute. Call this before `admit`."""
        if self.shared is not None and sequence.allocation is None:
            keys = sequence.request.prefix_blocks
            sequence.computed = self.shared.reusable_tokens(keys, sequence.prompt_tokens)
        return sequence.prefill_remaining

    def admit(self, sequence: ScheduledSequence) -> bool:
        """Take blocks and a slot for a waiting sequence. If the budget lacks either, take nothing and return False."""
        shared, keys = self.shared, sequence.request.prefix_blocks
        if shared is None:
            needed = self.blocks.blocks_for(sequence.start_tokens)
        else:
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
            found = shared.allocate_prompt(sequence.id, sequence.start_tokens, keys, sequence.prompt_tokens)
            sequence.allocation, sequence.copy = found.grant, found.copy
            sequence.computed = sequence.reused_tokens = found.tokens
        return True

    def admit_decode(self, sequence: ScheduledSequence) -> bool:
        """Take blocks for the output of a ready sequence, unless they were reserved before; False without blocks."""
        if sequence.decode_tokens == 0:
            return True
        needed = self.blocks.blocks_for(sequence.decode_tokens)
        if needed > self.free_blocks:
            return False
        self.free_blocks -= needed
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class Batcher(ABC):
    """Selects the sequences of the next batches. It changes only the budget and its own state.

    A selection holds until a sequence in it ends or a prompt in it is done. Until then decode iterations repeat
    without another call, unless `should_reschedule` asks for one.

    The class attributes are the traits by which configurations are checked.
    """

    prefills: ClassVar[bool] = True  # runs prompts
    decodes: ClassVar[bool] = True  # runs decodes
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

    @abstractmethod
    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        """Select the next batch.

        Waiting sequences start in order, each after `budget.admit`, so that large requests are not starved by small
        ones behind them; ready ones after `budget.admit_decode`.
        """

    def on_queued(self, sequence: ScheduledSequence) -> None:  # noqa: B027  (a hook, not an obligation)
        """A sequence was queued. It waits for prefill if it has no output token, else it is ready to decode."""

    def on_finished(self, sequence: ScheduledSequence) -> None:  # noqa: B027  (a hook)
        """A queued sequence left the instance: it finished, was aborted or continues on another instance."""

    def num_queued(self, queues: Queues) -> int:
        """Return how many sequences of the instance are not in the running batch, as reported to routers."""
        return queues.waiting.size + queues.ready.size + queues.paused.size

    def should_reschedule(
        self, sequence: ScheduledSequence | None, running: RunningBatch | None, blocks: BlockAllocator
    ) -> bool:
        """Whether to select a new batch at the next iteration.

        The cause is that `sequence` was queued or, if `sequence` is None, that blocks were freed.
        """
        return True


def select_prompts(waiting: SequenceQueue, budget: SchedulingBudget, tokens: int, seqs: int) -> list[PrefillChunk]:
    """Select whole prompts in order: at most `seqs` with `tokens` tokens in all, or one longer prompt alone."""
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
    """Select ready sequences in order to start their decode: at most `seqs`, and as many as have blocks."""
    chosen: list[ScheduledSequence] = []
    sequence = ready.first
    while sequence is not None and len(chosen) < seqs and budget.admit_decode(sequence):
        chosen.append(sequence)
        sequence = sequence.next
    return chosen
