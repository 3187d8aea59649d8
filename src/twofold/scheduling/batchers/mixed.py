"""Mixed continuous batching: prompts first, and every decode beside them."""

from twofold.scheduling.instance.batcher import (
    EagerBatcher,
    SchedulerOutput,
    SchedulingBudget,
    take_prompts,
    take_ready,
)
from twofold.scheduling.instance.queues import Queues


class MixedContinuous(EagerBatcher):
    """The colocated baseline of Splitwise (section 2.3): whole prompts join the running decodes.

    Prompts are not cut, so a long one holds up every decode of its iteration: this is the interference that
    splitting the phases removes. The token budget is for prompts; decodes run beside them.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs

    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        resume = take_ready(queues.ready, room, self.max_num_seqs - queues.decoding.size)
        prompts = take_prompts(
            queues.waiting,
            room,
            self.max_num_batched_tokens,
            max_prompts=self.max_num_seqs - queues.decoding.size - len(resume),
            longer_runs_alone=True,
        )
        return SchedulerOutput(prompts, resume)
