"""Prefill only: whole prompts, first come first served, up to a token budget."""

from twofold.scheduling.batcher import EagerBatcher, Room, Selection, take_prompts
from twofold.scheduling.queues import Queues


class PrefillFcfs(EagerBatcher):
    """Splitwise section 4.2: prompts FCFS, at most `token_budget` (2,048) tokens, a longer prompt runs alone."""

    def __init__(self, token_budget: int, max_seqs: int) -> None:
        self.token_budget = token_budget
        self.max_seqs = max_seqs

    def select(self, queues: Queues, room: Room) -> Selection:
        return Selection(
            take_prompts(
                queues.waiting,
                room,
                self.token_budget,
                max_prompts=self.max_seqs,
                longer_runs_alone=True,
            )
        )
