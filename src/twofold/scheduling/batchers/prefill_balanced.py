"""Prefill only: whole prompts in iterations of nearly equal length."""

from typing import ClassVar

from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget, select_prompts
from twofold.scheduling.instance.queues import Queues, SchedulerOutput

_LOOKAHEAD = 4  # token budgets


class PrefillBalanced(Batcher):
    """Prefills whole prompts in iterations of nearly equal length (DistServe section 4.3).

    Iterations of different lengths leave bubbles in a pipeline. If more prompts wait than fit in one iteration, those
    at the head of the queue are divided into as few iterations as needed, all about equal. A prompt longer than the
    budget runs alone.
    """

    decodes: ClassVar[bool] = False

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        share = self._share(queues, budget)
        return SchedulerOutput(select_prompts(queues.waiting, budget, share, self.max_num_seqs))

    def _share(self, queues: Queues, budget: SchedulingBudget) -> int:
        """Return the tokens of the next iteration: the sum of prompts at the head that is nearest to an equal
        share."""
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
