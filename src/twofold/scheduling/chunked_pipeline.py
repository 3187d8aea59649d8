"""The scheduler of a pipeline that computes several chunks of one prompt at once (Mooncake section 5.1).

    stage 1   chunk 1   chunk 2   chunk 3
    stage 2             chunk 1   chunk 2   chunk 3 ─▶ first token

A chunk begins when the first stage is done with the one before it, in another lane: prompts that are computed in part
stand in one line, from which every lane takes. Iterations pass each stage in the order in which they began, so there
a chunk finds the keys and values of those before it, and a chunk counts as computed once it has begun.
"""

from mypy_extensions import mypyc_attr

from twofold.kvcache.accounts import BlockAccounts
from twofold.kvcache.leases import LeaseBook
from twofold.scheduling.batcher import Batcher
from twofold.scheduling.iteration import StartedIteration
from twofold.scheduling.memory import WHOLE, MemoryRule
from twofold.scheduling.pipeline import PipelineScheduler
from twofold.scheduling.sequence import ScheduledSequence


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkedPipelineScheduler(PipelineScheduler):
    """A `PipelineScheduler` in which a prompt may be in several iterations under way, a chunk in each.

    Decodes stay in their lanes, as they do there.
    """

    def __init__(
        self,
        batcher: Batcher,
        blocks: BlockAccounts,
        leases: LeaseBook,
        max_num_seqs: int,
        stages: int,
        memory: MemoryRule = WHOLE,
    ) -> None:
        super().__init__(batcher, blocks, leases, max_num_seqs, stages, memory)
        self._prefilling = self._queues.prefilling
        for lane in self._lanes:
            lane.queues.prefilling = self._prefilling

    def start(self, now: float) -> StartedIteration | None:
        iteration = super().start(now)
        if iteration is not None:
            for part in iteration.prefills:
                part.sequence.computed += part.num_tokens
        return iteration

    def _turn_to_lane_of(self, sequence: ScheduledSequence) -> None:
        """Of a prompt the lane of its last chunk under way: its blocks are held until that has passed all stages."""
        if sequence.line is not self._prefilling:
            super()._turn_to_lane_of(sequence)
            return
        for lane in reversed(self._under_way):
            self._turn_to(lane)
            if self._is_running(sequence):
                break

    def _started(self) -> int:
        return self._prefilling.size + sum(lane.size for lane in self._lanes)
