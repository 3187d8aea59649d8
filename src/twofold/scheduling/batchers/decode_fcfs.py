"""Decode only: every sequence in place makes one token."""

from twofold.scheduling.batcher import EagerBatcher, Room, Selection, take_ready
from twofold.scheduling.queues import Queues


class DecodeFcfs(EagerBatcher):
    """Splitwise section 4.2: decodes FCFS as far as memory goes, at most `max_seqs` in an iteration."""

    def __init__(self, token_budget: int, max_seqs: int) -> None:
        self.max_seqs = min(max_seqs, token_budget)

    def select(self, queues: Queues, room: Room) -> Selection:
        seats = self.max_seqs - queues.decoding.size
        return Selection(resume=take_ready(queues.ready, room, seats))
