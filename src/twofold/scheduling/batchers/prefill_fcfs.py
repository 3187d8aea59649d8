"""Prefill only: whole prompts in order of arrival."""

from typing import ClassVar

from twofold.scheduling.instance.batcher import Batcher, SchedulerOutput, SchedulingBudget, select_prompts
from twofold.scheduling.instance.queues import Queues


class PrefillFcfs(Batcher):
    """Prefills whole prompts, first come first served, up to the token budget (Splitwise section 4.2).

    A prompt longer than the budget runs alone.
    """

    decodes: ClassVar[bool] = False
    whole_prompts: ClassVar[bool] = True

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        return SchedulerOutput(select_prompts(queues.waiting, budget, self.max_num_batched_tokens, self.max_num_seqs))
