"""Decode only: every running sequence makes one token."""

from collections.abc import Iterable
from itertools import islice

from twofold.batch import BatchItem
from twofold.scheduling.batcher import Room
from twofold.scheduling.sequence import ScheduledSequence


class DecodeFcfs:
    """Splitwise section 4.2: decodes FCFS as far as memory goes, at most `max_seqs` in an iteration.

    Memory was taken when the sequence's blocks were leased, so whatever runs here fits.
    """

    def __init__(self, token_budget: int, max_seqs: int) -> None:
        self.max_seqs = min(max_seqs, token_budget)

    def select(
        self, waiting: Iterable[ScheduledSequence], running: Iterable[ScheduledSequence], room: Room
    ) -> list[BatchItem]:
        decoding = (sequence for sequence in running if not sequence.in_prefill)
        return [sequence.decode_item() for sequence in islice(decoding, self.max_seqs)]
