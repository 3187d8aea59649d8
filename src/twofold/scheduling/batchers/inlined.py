"""Inlined prefill: whole prompts join the decodes while the iteration stays within the TBT bound."""

from math import inf
from typing import ClassVar

from twofold.performance.base import PerformanceModel
from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget, select_prompts, select_ready
from twofold.scheduling.instance.queues import Queues, SchedulerOutput
from twofold.scheduling.instance.sequence import PrefillChunk


class InlinedPrefill(Batcher):
    """Decodes first, then whole prompts while the iteration stays within the TBT bound (Mooncake section 5).

    Prompts join in order while they fit in the token budget and `times` predicts an iteration of at most `tbt_s`
    seconds. A prompt that does not fit waits, with those behind it, until enough decodes have ended; without decodes
    it always starts.
    """

    whole_prompts: ClassVar[bool] = True

    def __init__(
        self, max_num_batched_tokens: int, max_num_seqs: int, times: PerformanceModel | None = None, tbt_s: float = inf
    ) -> None:
        super().__init__(max_num_batched_tokens, max_num_seqs)
        self._times = times
        self._tbt_s = tbt_s

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        resume = select_ready(queues.ready, budget, self.max_num_seqs - queues.decoding.size)
        decodes, context = queues.decoding.size + len(resume), queues.decoding.context_tokens
        for sequence in resume:
            context += sequence.computed
        if decodes:
            return SchedulerOutput(self._beside(queues, budget, decodes, context), resume)
        return SchedulerOutput(select_prompts(queues.waiting, budget, self.max_num_batched_tokens, self.max_num_seqs))

    def _beside(self, queues: Queues, budget: SchedulingBudget, decodes: int, context: int) -> list[PrefillChunk]:
        """The prompts that may run beside `decodes` decodes, which read `context` KV tokens."""
        chunks: list[PrefillChunk] = []
        times, tokens, squares = self._times, 0, 0
        sequence = queues.waiting.first
        while sequence is not None and decodes + len(chunks) < self.max_num_seqs:
            more = budget.prefill_tokens(sequence)
            tokens += more
            squares += more * (more + 2 * sequence.computed)
            late = times is not None and times.mixed_s(tokens, squares, decodes, context) > self._tbt_s
            if tokens > self.max_num_batched_tokens or late or not budget.admit(sequence):
                break
            chunks.append(sequence.prefill(more))
            sequence = sequence.next
        return chunks
