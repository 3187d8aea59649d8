"""First come, first served, in one phase: whole prompts, or one token for every sequence."""

from typing import ClassVar

from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget, select_prompts, select_ready
from twofold.scheduling.instance.queues import Queues, SchedulerOutput


class PrefillFcfs(Batcher):
    """Prefills whole prompts, first come first served, up to the token budget (Splitwise section 4.2).

    A prompt longer than the budget runs alone.
    """

    decodes: ClassVar[bool] = False
    whole_prompts: ClassVar[bool] = True

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        return SchedulerOutput(select_prompts(queues.waiting, budget, self.max_num_batched_tokens, self.max_num_seqs))


class DecodeFcfs(Batcher):
    """Decodes only, first come first served, up to `max_num_seqs` (Splitwise section 4.2)."""

    prefills: ClassVar[bool] = False

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        super().__init__(max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens))

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        return SchedulerOutput(resume=select_ready(queues.ready, budget, self.max_num_seqs - queues.decoding.size))
