"""Prefill only: whole prompts, first come first served, up to a token budget."""

from twofold.scheduling.instance.batcher import EagerBatcher, SchedulerOutput, SchedulingBudget, take_prompts
from twofold.scheduling.instance.queues import Queues


class PrefillFcfs(EagerBatcher):
    """Splitwise section 4.2: prompts FCFS, at most `max_num_batched_tokens` (2,048) tokens, a longer prompt
    runs alone.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs

    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        return SchedulerOutput(
            take_prompts(
                queues.waiting,
                room,
                self.max_num_batched_tokens,
                max_prompts=self.max_num_seqs,
                longer_runs_alone=True,
            )
        )
