"""Batchers that run prefills and decodes on one instance: the colocated baselines."""

from itertools import chain
from math import inf
from typing import ClassVar

from twofold.performance.base import PerformanceModel
from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget, select_fairly, select_prompts, select_ready
from twofold.scheduling.instance.queues import Queues, SchedulerOutput
from twofold.scheduling.instance.sequence import PrefillChunk


class MixedContinuous(Batcher):
    """Batches all decodes with whole prompts (Splitwise section 2.3). The token budget limits only prompt tokens."""

    whole_prompts: ClassVar[bool] = True

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        resume = select_fairly(queues, budget, self.max_num_seqs)
        seats = self.max_num_seqs - queues.decoding.size - len(resume)
        prompts = select_prompts(queues.waiting, budget, self.max_num_batched_tokens, seats)
        return SchedulerOutput(prompts, resume)


class PrefillFirst(Batcher):
    """Batches only prompts while prompts are waiting, and pauses all decodes meanwhile (DistServe's baseline; vLLM
    before chunked prefill). Paused decodes keep their KV cache.
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


class ChunkedPrefill(Batcher):
    """Batches all decodes, then prompt chunks up to the token budget (Sarathi-Serve, OSDI'24; vLLM's default)."""

    cuts_prompts: ClassVar[bool] = True
    live_token_budget: ClassVar[int] = 512

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        super().__init__(max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens))

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        resume = select_fairly(queues, budget, self.max_num_seqs)
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


class InlinedPrefill(Batcher):
    """Batches all decodes, then whole prompts while the iteration meets the TBT bound (Mooncake section 5).

    Prompts join in queue order while they fit into the token budget and the predicted iteration time is within the
    bound.
    """

    whole_prompts: ClassVar[bool] = True

    def __init__(
        self, max_num_batched_tokens: int, max_num_seqs: int, times: PerformanceModel | None = None, tbt_s: float = inf
    ) -> None:
        super().__init__(max_num_batched_tokens, max_num_seqs)
        self._times = times
        self._tbt_s = tbt_s

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        resume = select_fairly(queues, budget, self.max_num_seqs)
        decodes, context = queues.decoding.size + len(resume), queues.decoding.context_tokens
        for sequence in resume:
            context += sequence.computed
        if decodes:
            return SchedulerOutput(self._beside(queues, budget, decodes, context), resume)
        return SchedulerOutput(select_prompts(queues.waiting, budget, self.max_num_batched_tokens, self.max_num_seqs))

    def _beside(self, queues: Queues, budget: SchedulingBudget, decodes: int, context: int) -> list[PrefillChunk]:
        """Select the prompts to batch with `decodes` decodes."""
        # The decodes read `context` KV tokens in total. The first prompt that does not fit blocks all later prompts
        # until enough decodes have ended.
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
