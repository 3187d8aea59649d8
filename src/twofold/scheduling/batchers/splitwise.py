"""Splitwise's mixed batching: prompts first within one token budget; decodes that do not fit pause, not for ever."""

from itertools import chain
from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.scheduling.instance.batcher import EagerBatcher, SchedulerOutput, SchedulingBudget, take_ready
from twofold.scheduling.instance.queues import Queues
from twofold.scheduling.instance.sequence import ScheduledSequence


@mypyc_attr(allow_interpreted_subclasses=True)
class SplitwiseMixed(EagerBatcher):
    """Splitwise section 4.2, for an instance of any role.

    Prompts and decodes share the token budget; prompts go first, whole and first come first served, one longer
    than the budget runs alone. Decodes that do not fit are paused and keep their memory. One that was left out of
    `MAX_PREEMPTIONS` selections in a row goes before the prompts.
    """

    MAX_PREEMPTIONS: ClassVar[int] = 4

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self._left_out: dict[str, int] = {}

    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        selection = SchedulerOutput()
        overdue: list[ScheduledSequence] = []
        if queues.paused.size:
            overdue = [s for s in queues.paused if self._left_out[s.id] >= self.MAX_PREEMPTIONS]
            overdue = overdue[: min(self.max_num_seqs, self.max_num_batched_tokens)]
        seats, budget = self.max_num_seqs - len(overdue), self.max_num_batched_tokens - len(overdue)
        sequence = queues.waiting.first
        while sequence is not None:
            tokens = room.remaining(sequence)
            fits = tokens <= budget or not (selection.prefills or overdue)
            if not fits or seats < 1 or not room.take(sequence):
                break
            selection.prefills.append(sequence.prefill(tokens))
            seats -= 1
            budget -= tokens
            sequence = sequence.after
        if queues.ready.size or queues.paused.size or queues.decoding.size:
            self._decode(selection, overdue, queues, room, max(0, min(seats, budget)))
        return selection

    def _decode(
        self,
        selection: SchedulerOutput,
        overdue: list[ScheduledSequence],
        queues: Queues,
        room: SchedulingBudget,
        seats: int,
    ) -> None:
        """Share what the prompts leave: paused decodes first, then running ones, then those that begin."""
        decodes, paused = queues.decoding.size, list[ScheduledSequence]()
        if queues.paused.size:
            chosen = {s.id for s in overdue}
            paused = [s for s in queues.paused if s.id not in chosen]
            selection.resume = overdue + paused[:seats]
            paused = paused[seats:]
            seats -= len(selection.resume) - len(overdue)
            selection.stands = not (overdue or paused)
        if decodes > seats:
            selection.pause = queues.decoding.latest(decodes - seats)
        if queues.ready.size:
            seats -= decodes - len(selection.pause)
            selection.resume += take_ready(queues.ready, room, seats)
        if self._left_out:
            for sequence in selection.resume:
                self._left_out.pop(sequence.id, None)
        for sequence in chain(paused, selection.pause):
            self._left_out[sequence.id] = self._left_out.get(sequence.id, 0) + 1

    def gone(self, sequence: ScheduledSequence) -> None:
        if self._left_out:
            self._left_out.pop(sequence.id, None)
