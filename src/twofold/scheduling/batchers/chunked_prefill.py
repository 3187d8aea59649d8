"""Chunked prefill: decodes first, prompts in pieces that fill what is left of the token budget."""

from collections.abc import Iterable
from itertools import islice

from twofold.batch import BatchItem
from twofold.scheduling.batcher import Room
from twofold.scheduling.sequence import ScheduledSequence


class ChunkedPrefill:
    """The stronger colocated baseline (Sarathi-Serve, OSDI'24; the default of vLLM).

    No iteration computes more than `token_budget` tokens, so a long prompt delays decodes by a bounded time
    each iteration instead of a long time once.
    """

    def __init__(self, token_budget: int, max_seqs: int) -> None:
        self.token_budget = token_budget
        self.max_seqs = min(max_seqs, token_budget)

    def select(
        self, waiting: Iterable[ScheduledSequence], running: Iterable[ScheduledSequence], room: Room
    ) -> list[BatchItem]:
        started = list(running)
        decoding = (sequence for sequence in started if not sequence.in_prefill)
        items = [sequence.decode_item() for sequence in islice(decoding, self.max_seqs)]
        budget = self.token_budget - len(items)
        for sequence in started:
            if sequence.in_prefill and budget > 0 and len(items) < self.max_seqs:
                items.append(sequence.prefill_item(min(budget, sequence.prefill_remaining)))
                budget -= items[-1].num_tokens
        for sequence in waiting:
            if budget < 1 or len(items) >= self.max_seqs or not room.take(sequence):
                break
            items.append(sequence.prefill_item(min(budget, sequence.prefill_remaining)))
            budget -= items[-1].num_tokens
        return items
