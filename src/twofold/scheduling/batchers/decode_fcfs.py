"""Decode only: every sequence in place makes one token."""

from twofold.scheduling.instance.batcher import EagerBatcher, SchedulerOutput, SchedulingBudget, take_ready
from twofold.scheduling.instance.queues import Queues


class DecodeFcfs(EagerBatcher):
    """Splitwise section 4.2: decodes FCFS as far as memory goes, at most `max_num_seqs` in an iteration."""

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)

    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        seats = self.max_num_seqs - queues.decoding.size
        return SchedulerOutput(resume=take_ready(queues.ready, room, seats))
