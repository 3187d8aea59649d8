"""Splitwise's mixed batching: prompts first, then decodes, within one token budget; excess decodes are preempted."""

from itertools import chain
from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget, select_ready
from twofold.scheduling.instance.queues import Queues, SchedulerOutput
from twofold.scheduling.instance.sequence import ScheduledSequence


@mypyc_attr(allow_interpreted_subclasses=True)
class SplitwiseMixed(Batcher):
    """Fills the token budget of a batch with whole prompts, and then with decodes (Splitwise section 4.2).

    Instances of any role can use this batcher. Decodes that do not fit are paused, and keep their KV cache.
    Decodes that were left out of several batches go before prompts.
    """

    MAX_PREEMPTIONS: ClassVar[int] = 4
    may_preempt: ClassVar[bool] = True

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        super().__init__(max_num_batched_tokens, max_num_seqs)
        self._skipped: dict[str, int] = {}  # selections in a row that left out a paused decode

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        output = SchedulerOutput()
        # Decodes left out too often take precedence over prompts.
        overdue: list[ScheduledSequence] = []
        if queues.paused.size:
            overdue = [s for s in queues.paused if self._skipped[s.id] >= self.MAX_PREEMPTIONS]
            overdue = overdue[: min(self.max_num_seqs, self.max_num_batched_tokens)]
        seats, left = self.max_num_seqs - len(overdue), self.max_num_batched_tokens - len(overdue)
        sequence = queues.waiting.first
        while sequence is not None:
            tokens = budget.prefill_tokens(sequence)
            # A prompt longer than the budget runs alone.
            fits = tokens <= left or not (output.prefills or overdue)
            if not fits or seats < 1 or not budget.admit(sequence):
                break
            output.prefills.append(sequence.prefill(tokens))
            seats -= 1
            left -= tokens
            sequence = sequence.next
        if queues.ready.size or queues.paused.size or queues.decoding.size:
            self._select_decodes(output, overdue, queues, budget, max(0, min(seats, left)))
        return output

    def _select_decodes(
        self,
        output: SchedulerOutput,
        overdue: list[ScheduledSequence],
        queues: Queues,
        budget: SchedulingBudget,
        seats: int,
    ) -> None:
        """Fill the remaining sequence slots with decodes: paused decodes first, then running, then new decodes."""
        decodes, paused = queues.decoding.size, list[ScheduledSequence]()
        if queues.paused.size:
            chosen = {s.id for s in overdue}
            paused = [s for s in queues.paused if s.id not in chosen]
            output.resume = overdue + paused[:seats]
            paused = paused[seats:]
            seats -= len(output.resume) - len(overdue)
            output.repeatable = not (overdue or paused)
        if decodes > seats:
            output.pause = queues.decoding.latest(decodes - seats)
        if queues.ready.size:
            seats -= decodes - len(output.pause)
            output.resume += select_ready(queues.ready, budget, seats)
        if self._skipped:
            for sequence in output.resume:
                self._skipped.pop(sequence.id, None)
        for sequence in chain(paused, output.pause):
            self._skipped[sequence.id] = self._skipped.get(sequence.id, 0) + 1

    def on_finished(self, sequence: ScheduledSequence) -> None:
        if self._skipped:
            self._skipped.pop(sequence.id, None)
