"""Prefill only: short prompts whole, long ones in equal chunks, first come first served."""

from itertools import chain

from twofold.scheduling.instance.batcher import EagerBatcher, SchedulerOutput, SchedulingBudget
from twofold.scheduling.instance.queues import Queues
from twofold.scheduling.instance.sequence import PrefillChunk


class PrefillChunks(EagerBatcher):
    """Mooncake section 5.1: an iteration computes at most `chunk_tokens` tokens, and a prompt of more is divided.

    It is divided into as few chunks as there may be, all about equal, because iterations of different lengths leave
    bubbles in a pipeline. A prompt that one iteration can take is not cut: it waits for an iteration that has room
    for all of it, behind those that came before.
    """

    def __init__(self, chunk_tokens: int, max_num_seqs: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.max_num_seqs = max_num_seqs

    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        parts: list[PrefillChunk] = []
        budget = self.chunk_tokens
        for sequence in chain(queues.prefilling, queues.waiting):
            tokens = self._chunk(room.remaining(sequence))
            if not tokens:
                continue  # in a pipeline: its last chunk is under way
            if tokens > budget or len(parts) >= self.max_num_seqs:
                break
            if sequence.line is queues.waiting and not room.take(sequence):
                break
            parts.append(sequence.prefill(tokens))
            budget -= tokens
        return SchedulerOutput(parts)

    def _chunk(self, remaining: int) -> int:
        """Tokens of the next of the chunks into which what remains of a prompt is divided."""
        chunks = -(-remaining // self.chunk_tokens)
        return -(-remaining // chunks) if chunks else 0
