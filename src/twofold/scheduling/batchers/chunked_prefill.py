"""Chunked prefill: decodes first, prompts in pieces that fill what is left of the token budget."""

from itertools import chain

from twofold.scheduling.batcher import EagerBatcher, Room, Selection, take_ready
from twofold.scheduling.queues import Queues


class ChunkedPrefill(EagerBatcher):
    """The stronger colocated baseline (Sarathi-Serve, OSDI'24; the default of vLLM).

    No iteration computes more than `token_budget` tokens, so a long prompt delays decodes by a bounded time
    each iteration instead of a long time once.
    """

    def __init__(self, token_budget: int, max_seqs: int) -> None:
        self.token_budget = token_budget
        self.max_seqs = min(max_seqs, token_budget)

    def select(self, queues: Queues, room: Room) -> Selection:
        resume = take_ready(queues.ready, room, self.max_seqs - queues.decoding.size)
        selection = Selection(resume=resume)
        decodes = queues.decoding.size + len(resume)
        budget, seats = self.token_budget - decodes, self.max_seqs - decodes
        for sequence in chain(queues.prefilling, queues.waiting):
            if budget < 1 or seats < 1:
                break
            tokens = min(budget, room.remaining(sequence))
            if sequence.line is queues.waiting and not room.take(sequence):
                break
            item = sequence.prefill(tokens)
            selection.prefills.append(item)
            budget -= item.num_tokens
            seats -= 1
        return selection
