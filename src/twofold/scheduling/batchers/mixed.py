"""Mixed continuous batching: whole prompts beside all decodes."""

from typing import ClassVar

from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget, select_prompts, select_ready
from twofold.scheduling.instance.queues import Queues, SchedulerOutput


class MixedContinuous(Batcher):
    """Whole prompts up to the token budget, beside all decodes (colocated baseline, Splitwise section 2.3).

    A long prompt delays every decode of its iteration: the interference that phase splitting removes. The token
    budget is for prompts alone.
    """

    whole_prompts: ClassVar[bool] = True

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        seats = self.max_num_seqs - queues.decoding.size
        resume = select_ready(queues.ready, budget, seats)
        prompts = select_prompts(queues.waiting, budget, self.max_num_batched_tokens, seats - len(resume))
        return SchedulerOutput(prompts, resume)
