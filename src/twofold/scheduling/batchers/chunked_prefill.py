"""Chunked prefill: decodes first, then prompt chunks that fill the rest of the token budget."""

from itertools import chain
from typing import ClassVar

from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget, select_ready
from twofold.scheduling.instance.queues import Queues, SchedulerOutput


class ChunkedPrefill(Batcher):
    """Decodes first, then prompt chunks up to the token budget (Sarathi-Serve, vLLM's default).

    The stronger colocated baseline (OSDI'24): a long prompt delays every iteration by a bounded time instead of one
    iteration by a long time.
    """

    cuts_prompts: ClassVar[bool] = True
    live_token_budget: ClassVar[int] = 512

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        super().__init__(max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens))

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        resume = select_ready(queues.ready, budget, self.max_num_seqs - queues.decoding.size)
        output = SchedulerOutput(resume=resume)
        decodes = queues.decoding.size + len(resume)
        left, seats = self.max_num_batched_tokens - decodes, self.max_num_seqs - decodes
        for sequence in chain(queues.prefilling, queues.waiting):
            if left < 1 or seats < 1:
                break
            tokens = min(left, budget.prefill_tokens(sequence))
            if sequence.queue is queues.waiting and not budget.admit(sequence):
                break
            chunk = sequence.prefill(tokens)
            output.prefills.append(chunk)
            left -= chunk.num_tokens
            seats -= 1
        return output
