"""Batchers that run only prefills or only decodes."""

from itertools import chain
from typing import ClassVar

from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget, select_prompts, select_ready
from twofold.scheduling.instance.queues import Queues, SchedulerOutput
from twofold.scheduling.instance.sequence import PrefillChunk


class PrefillFcfs(Batcher):
    """Batches only whole prompts, in order of arrival; one beyond the budget runs alone (Splitwise section 4.2)."""

    decodes: ClassVar[bool] = False
    whole_prompts: ClassVar[bool] = True

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        return SchedulerOutput(select_prompts(queues.waiting, budget, self.max_num_batched_tokens, self.max_num_seqs))


class DecodeFcfs(Batcher):
    """Batches only decodes, first come first served, up to `max_num_seqs` (Splitwise section 4.2)."""

    prefills: ClassVar[bool] = False

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        super().__init__(max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens))

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        return SchedulerOutput(resume=select_ready(queues.ready, budget, self.max_num_seqs - queues.decoding.size))


_LOOKAHEAD = 4  # token budgets


class PrefillBalanced(Batcher):
    """Batches only whole prompts, in iterations with nearly equal numbers of tokens (DistServe section 4.3), because
    unequal iterations leave bubbles in a pipeline.
    """

    decodes: ClassVar[bool] = False

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        share = self._share(queues, budget)
        return SchedulerOutput(select_prompts(queues.waiting, budget, share, self.max_num_seqs))

    def _share(self, queues: Queues, budget: SchedulingBudget) -> int:
        """Return the number of prompt tokens for the next iteration."""
        # The prompts at the head of the queue are divided evenly among as few iterations as possible. A prompt longer
        # than the token budget runs alone.
        limit, ahead = self.max_num_batched_tokens, 0
        for sequence in queues.waiting:
            tokens = budget.prefill_tokens(sequence)
            if tokens > limit or ahead + tokens > _LOOKAHEAD * limit:
                break
            ahead += tokens
        iterations = -(-ahead // limit)
        taken = 0
        for sequence in queues.waiting:
            tokens = budget.prefill_tokens(sequence)
            # Take the prompt if the share is nearer to the sum with it than to the sum without it.
            nearer = (2 * taken + tokens) * iterations < 2 * ahead
            if taken + tokens > limit or (taken and not nearer):
                break
            taken += tokens
        return taken or limit


class PrefillChunks(Batcher):
    """Batches only prompts, in as few chunks as the token budget allows (Mooncake section 5.1)."""

    decodes: ClassVar[bool] = False
    cuts_prompts: ClassVar[bool] = True
    chunked: ClassVar[bool] = True

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        chunks: list[PrefillChunk] = []
        left = self.max_num_batched_tokens
        for sequence in chain(queues.prefilling, queues.waiting):
            remaining = budget.prefill_tokens(sequence)
            if not remaining:
                continue  # its last chunk is running in another lane
            # Nearly equal chunks, because unequal iterations leave bubbles in a pipeline.
            chunks_left = -(-remaining // self.max_num_batched_tokens)
            tokens = -(-remaining // chunks_left)
            if tokens > left or len(chunks) >= self.max_num_seqs:
                break
            if sequence.queue is queues.waiting and not budget.admit(sequence):
                break
            chunks.append(sequence.prefill(tokens))
            left -= tokens
        return SchedulerOutput(chunks)
