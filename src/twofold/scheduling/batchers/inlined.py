"""Prefill inlined into decode: whole prompts join the decodes only while each token still comes in time."""

from math import inf

from twofold.performance.base import PerformanceModel
from twofold.scheduling.instance.batcher import (
    EagerBatcher,
    SchedulerOutput,
    SchedulingBudget,
    take_prompts,
    take_ready,
)
from twofold.scheduling.instance.queues import Queues
from twofold.scheduling.instance.sequence import PrefillChunk


class InlinedPrefill(EagerBatcher):
    """Mooncake section 5: a prefill may go into a decode batch if it need not be cut and TBT allows.

    Decodes go first. Beside them prompts start, first come first served, as long as they fit in the token budget and
    `times` expects an iteration of at most `tbt_s` seconds. One that would take longer waits, and those behind it,
    until enough decodes have ended, at last all of them: without decodes there is nobody to wait for it.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        times: PerformanceModel | None = None,
        tbt_s: float = inf,
    ) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self._times = times
        self._tbt_s = tbt_s

    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        resume = take_ready(queues.ready, room, self.max_num_seqs - queues.decoding.size)
        decodes, context = queues.decoding.size + len(resume), queues.decoding.context_tokens
        for sequence in resume:
            context += sequence.computed
        if decodes:
            return SchedulerOutput(self._beside(queues, room, decodes, context), resume)
        return SchedulerOutput(
            take_prompts(
                queues.waiting,
                room,
                self.max_num_batched_tokens,
                max_prompts=self.max_num_seqs,
                longer_runs_alone=True,
            )
        )

    def _beside(
        self, queues: Queues, room: SchedulingBudget, decodes: int, context: int
    ) -> list[PrefillChunk]:
        """The prompts that may run beside so many decodes, which read `context` KV tokens."""
        parts: list[PrefillChunk] = []
        tokens = squares = 0
        sequence = queues.waiting.first
        while sequence is not None and decodes + len(parts) < self.max_num_seqs:
            more = room.remaining(sequence)
            tokens += more
            squares += more * (more + 2 * sequence.computed)
            if not self._in_time(tokens, squares, decodes, context) or not room.take(sequence):
                break
            parts.append(sequence.prefill(more))
            sequence = sequence.after
        return parts

    def _in_time(self, tokens: int, squares: int, decodes: int, context: int) -> bool:
        if tokens > self.max_num_batched_tokens:
            return False
        times = self._times
        return times is None or times.mixed_s(tokens, squares, decodes, context) <= self._tbt_s
