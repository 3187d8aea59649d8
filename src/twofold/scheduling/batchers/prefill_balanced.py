"""Prefill only: whole prompts, first come first served, in iterations that are as equal as they can be."""

from twofold.scheduling.instance.batcher import EagerBatcher, SchedulerOutput, SchedulingBudget, take_prompts
from twofold.scheduling.instance.queues import Queues

_AHEAD = 4  # budgets: how far down the line it looks


class PrefillBalanced(EagerBatcher):
    """Iterations of different lengths leave bubbles in a pipeline (DistServe, section 4.3).

    Where more waits than one iteration may have, the prompts at the head of the line are cut into as few iterations as
    are needed, all about equal, instead of full ones and a rest. A prompt longer than the budget runs alone.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs

    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        return SchedulerOutput(
            take_prompts(
                queues.waiting,
                room,
                self._share(queues, room),
                max_prompts=self.max_num_seqs,
                longer_runs_alone=True,
            )
        )

    def _share(self, queues: Queues, room: SchedulingBudget) -> int:
        """Tokens of the next iteration: of the prompts from the head on, those that come nearest to an equal share."""
        budget, ahead = self.max_num_batched_tokens, 0
        for sequence in queues.waiting:
            tokens = room.remaining(sequence)
            if tokens > budget or ahead + tokens > _AHEAD * budget:
                break
            ahead += tokens
        iterations = -(-ahead // budget)
        taken = 0
        for sequence in queues.waiting:
            tokens = room.remaining(sequence)
            # Twice the share lies between what there is without it and what there would be with it: take it if nearer.
            nearer = (2 * taken + tokens) * iterations < 2 * ahead
            if taken + tokens > budget or (taken and not nearer):
                break
            taken += tokens
        return taken or budget
