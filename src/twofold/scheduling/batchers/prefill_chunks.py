"""Prefill only: short prompts whole, long ones in equal chunks."""

from itertools import chain
from typing import ClassVar

from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget
from twofold.scheduling.instance.queues import Queues, SchedulerOutput
from twofold.scheduling.instance.sequence import PrefillChunk


class PrefillChunks(Batcher):
    """Prefills prompts in equal chunks of at most the token budget (Mooncake section 5.1).

    A longer prompt is divided into as few chunks as possible, all about equal, because iterations of different
    lengths leave bubbles in a pipeline. A prompt that fits in one iteration is not cut: it waits for one with enough
    tokens left.
    """

    decodes: ClassVar[bool] = False
    cuts_prompts: ClassVar[bool] = True
    chunked: ClassVar[bool] = True

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        chunks: list[PrefillChunk] = []
        left = self.max_num_batched_tokens
        for sequence in chain(queues.prefilling, queues.waiting):
            remaining = budget.prefill_tokens(sequence)
            if not remaining:
                continue  # its last chunk is running in another lane
            chunks_left = -(-remaining // self.max_num_batched_tokens)
            tokens = -(-remaining // chunks_left)
            if tokens > left or len(chunks) >= self.max_num_seqs:
                break
            if sequence.queue is queues.waiting and not budget.admit(sequence):
                break
            chunks.append(sequence.prefill(tokens))
            left -= tokens
        return SchedulerOutput(chunks)
