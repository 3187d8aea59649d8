"""Chunked prefill: decodes first, prompts in pieces that fill what is left of the token budget."""

from itertools import chain

from twofold.scheduling.instance.batcher import EagerBatcher, SchedulerOutput, SchedulingBudget, take_ready
from twofold.scheduling.instance.queues import Queues


class ChunkedPrefill(EagerBatcher):
    """The stronger colocated baseline (Sarathi-Serve, OSDI'24; the default of vLLM).

    No iteration computes more than `max_num_batched_tokens` tokens, so a long prompt delays decodes by a bounded time
    each iteration instead of a long time once.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)

    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        resume = take_ready(queues.ready, room, self.max_num_seqs - queues.decoding.size)
        selection = SchedulerOutput(resume=resume)
        decodes = queues.decoding.size + len(resume)
        budget, seats = self.max_num_batched_tokens - decodes, self.max_num_seqs - decodes
        for sequence in chain(queues.prefilling, queues.waiting):
            if budget < 1 or seats < 1:
                break
            tokens = min(budget, room.remaining(sequence))
            if sequence.line is queues.waiting and not room.take(sequence):
                break
            item = sequence.prefill(tokens)
            selection.prefills.append(item)
            budget -= item.num_tokens
            seats -= 1
        return selection
