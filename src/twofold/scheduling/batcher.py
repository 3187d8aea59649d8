"""The batcher seam: which work goes into the next iteration of an instance?"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from twofold.batch import BatchItem
from twofold.kvcache.blocks import BlockManager
from twofold.scheduling.sequence import ScheduledSequence


@dataclass(slots=True)
class Room:
    """What is left for sequences that have not started: blocks of the cache and seats in the running set."""

    blocks: BlockManager
    free_blocks: int
    free_seats: int

    def take(self, sequence: ScheduledSequence) -> bool:
        """Set room aside for a waiting sequence; False, and nothing taken, when there is not enough."""
        needed = self.blocks.blocks_for(sequence.cache_tokens)
        if self.free_seats < 1 or needed > self.free_blocks:
            return False
        self.free_seats -= 1
        self.free_blocks -= needed
        return True


class Batcher(Protocol):
    """Picks the items of the next iteration; it changes nothing but `room`.

    `waiting` holds sequences that have not started, first come first; a batcher may start them in that order
    only, each after `room.take` said yes, so that a large request is never starved by small ones behind it.
    `running` holds started sequences, in the order they started: partly prefilled or decoding.
    """

    def select(
        self, waiting: Iterable[ScheduledSequence], running: Iterable[ScheduledSequence], room: Room
    ) -> list[BatchItem]: ...


def take_prompts(
    waiting: Iterable[ScheduledSequence], room: Room, token_budget: int, *, longer_runs_alone: bool
) -> list[BatchItem]:
    """Whole prompts, first come first, up to `token_budget` tokens; the first may exceed it if it runs alone."""
    items: list[BatchItem] = []
    for sequence in waiting:
        tokens = sequence.prefill_remaining
        fits = tokens <= token_budget or (longer_runs_alone and not items)
        if not fits or not room.take(sequence):
            break
        items.append(sequence.prefill_item(tokens))
        token_budget -= tokens
    return items
