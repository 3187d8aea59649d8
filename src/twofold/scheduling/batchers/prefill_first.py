"""Prefill first: prompts preempt all decodes."""

from typing import ClassVar

from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget, select_prompts, select_ready
from twofold.scheduling.instance.queues import Queues, SchedulerOutput


class PrefillFirst(Batcher):
    """Prompts first, and all decodes paused meanwhile (colocated baseline of DistServe, vLLM before chunked prefill).

    Paused decodes keep their KV cache and count as preempted. Decodes never slow a prompt, and prompts delay decodes
    for as long as they keep coming.
    """

    whole_prompts: ClassVar[bool] = True
    may_preempt: ClassVar[bool] = True

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        prompts = select_prompts(queues.waiting, budget, self.max_num_batched_tokens, self.max_num_seqs)
        if prompts:
            output = SchedulerOutput(prompts)
            output.pause = list(queues.decoding)
            return output
        resume = list(queues.paused)
        seats = self.max_num_seqs - queues.decoding.size - len(resume)
        return SchedulerOutput(resume=resume + select_ready(queues.ready, budget, seats))
