"""Prefill only: whole prompts, first come first served, up to a token budget."""

from collections.abc import Iterable

from twofold.batch import BatchItem
from twofold.scheduling.batcher import Room, take_prompts
from twofold.scheduling.sequence import ScheduledSequence


class PrefillFcfs:
    """Splitwise section 4.2: prompts FCFS, at most `token_budget` (2,048) tokens, a longer prompt runs alone."""

    def __init__(self, token_budget: int, max_seqs: int) -> None:
        self.token_budget = token_budget
        self.max_seqs = max_seqs

    def select(
        self, waiting: Iterable[ScheduledSequence], running: Iterable[ScheduledSequence], room: Room
    ) -> list[BatchItem]:
        return take_prompts(waiting, room, self.token_budget, longer_runs_alone=True)
