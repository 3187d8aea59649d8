"""Mixed continuous batching: prompts first, and every decode beside them."""

from collections.abc import Iterable
from itertools import islice

from twofold.batch import BatchItem
from twofold.scheduling.batcher import Room, take_prompts
from twofold.scheduling.sequence import ScheduledSequence


class MixedContinuous:
    """The colocated baseline of Splitwise (section 2.3): whole prompts join the running decodes.

    Prompts are not cut, so a long one holds up every decode of its iteration: this is the interference that
    splitting the phases removes. Of `max_seqs` sequences in an iteration prompts take their share first.
    """

    def __init__(self, token_budget: int, max_seqs: int) -> None:
        self.token_budget = token_budget
        self.max_seqs = max_seqs

    def select(
        self, waiting: Iterable[ScheduledSequence], running: Iterable[ScheduledSequence], room: Room
    ) -> list[BatchItem]:
        prompts = take_prompts(waiting, room, self.token_budget, longer_runs_alone=True)
        decoding = (sequence for sequence in running if not sequence.in_prefill)
        return prompts + [s.decode_item() for s in islice(decoding, self.max_seqs - len(prompts))]
