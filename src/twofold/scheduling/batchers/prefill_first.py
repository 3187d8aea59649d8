"""Prompts first, and nothing beside them."""

from twofold.scheduling.instance.batcher import (
    EagerBatcher,
    SchedulerOutput,
    SchedulingBudget,
    take_prompts,
    take_ready,
)
from twofold.scheduling.instance.queues import Queues


class PrefillFirst(EagerBatcher):
    """The colocated baseline of DistServe: how vLLM batched before it cut prompts into chunks.

    While prompts run, first come first served up to the token budget, every decode stands still and keeps its memory
    (which counts as a pre-emption): decodes never slow a prompt, and prompts hold decodes up for as long as they come.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs

    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        prompts = take_prompts(
            queues.waiting,
            room,
            self.max_num_batched_tokens,
            max_prompts=self.max_num_seqs,
            longer_runs_alone=True,
        )
        if prompts:
            selection = SchedulerOutput(prompts)
            selection.pause = list(queues.decoding)
            return selection
        resume = list(queues.paused)
        seats = self.max_num_seqs - queues.decoding.size - len(resume)
        return SchedulerOutput(resume=resume + take_ready(queues.ready, room, seats))
