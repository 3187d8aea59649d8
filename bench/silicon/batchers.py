"""Batchers of serving engines that let prompts wait beside decodes, so that more of them share an iteration."""

from typing import ClassVar

from twofold.scheduling.batchers.mixed import ChunkedPrefill, PrefillFirst
from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget, select_ready
from twofold.scheduling.instance.queues import Queues, SchedulerOutput


def _decodes_only(batcher: Batcher, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
    """Select all decodes for one iteration, while prompts wait."""
    resume = list(queues.paused)
    seats = batcher.max_num_seqs - queues.decoding.size - len(resume)
    output = SchedulerOutput(resume=resume + select_ready(queues.ready, budget, seats))
    output.repeatable = False
    return output


class ReceivesAtIntervals(PrefillFirst):
    """SGLang with `--scheduler-recv-interval`: new requests are received after a prefill iteration, after each
    `interval` decode iterations, and while nothing runs.
    """

    interval: ClassVar[int]

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        super().__init__(max_num_batched_tokens, max_num_seqs)
        self._last_prefill = 0  # decode iterations before it

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        done = queues.decoding.iterations
        if queues.decodes and (done - self._last_prefill) % self.interval:
            return _decodes_only(self, queues, budget)
        output = super().select(queues, budget)
        if output.prefills:
            self._last_prefill = done
        return output


class WaitsForTokens(ChunkedPrefill):
    """TensorRT-LLM with `batch_wait_timeout_iters` and `batch_wait_max_tokens_ratio`: beside decodes, prompts wait for
    at most `iterations` until the tokens of an iteration reach `share` of the budget.
    """

    iterations: ClassVar[int]
    share: ClassVar[float]

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        super().__init__(max_num_batched_tokens, max_num_seqs)
        self._waited = 0

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        if queues.decodes and self._waited < self.iterations and self._tokens(queues) < self._enough:
            self._waited += 1
            return _decodes_only(self, queues, budget)
        self._waited = 0
        return super().select(queues, budget)

    @property
    def _enough(self) -> float:
        return self.share * self.max_num_batched_tokens

    def _tokens(self, queues: Queues) -> int:
        """Return the tokens of an iteration with all prompts."""
        prompts = (sequence.prefill_remaining for queue in (queues.prefilling, queues.waiting) for sequence in queue)
        return queues.decodes + sum(prompts)
