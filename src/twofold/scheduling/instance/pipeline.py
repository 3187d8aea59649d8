"""The scheduler of an instance that is a pipeline: several iterations are under way, each on sequences of its own.

While one stage computes an iteration the stages before it compute others. A sequence's next token needs its last one,
so it is in one iteration at a time: sequences are divided among as many **lanes** as there are stages, and a lane
starts its next iteration when its last one has passed all stages. Prompts wait in one line, from which a lane that
starts takes what its batcher selects; when a prompt is done its sequence joins the lane that has the fewest.

The scheduler of a pipeline that computes several chunks of one prompt at once (Mooncake section 5.1).

    stage 1   chunk 1   chunk 2   chunk 3
    stage 2             chunk 1   chunk 2   chunk 3 ─▶ first token

A chunk begins when the first stage is done with the one before it, in another lane: prompts that are computed in part
stand in one line, from which every lane takes. Iterations pass each stage in the order in which they began, so there
a chunk finds the keys and values of those before it, and a chunk counts as computed once it has begun.
"""

from collections.abc import Collection

from mypy_extensions import mypyc_attr

from twofold.batch import Batch
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator
from twofold.kvcache.leases import LeaseTable
from twofold.scheduling.instance.batch import RunningBatch, StepResult
from twofold.scheduling.instance.batcher import Batcher
from twofold.scheduling.instance.kv_reservation import FULL_RESERVATION, KvReservation
from twofold.scheduling.instance.queues import Queues
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.sequence import ScheduledSequence, SequenceQueue
from twofold.scheduling.instance.status import Outcome


class Lane:
    """Sequences that are in the same iterations, and the iteration that is under way, if one is."""

    __slots__ = ("aborted", "batch", "iteration", "number", "queues")

    def __init__(self, number: int, queues: Queues, aborted: list[BlockAllocation]) -> None:
        self.number = number
        self.queues = queues
        self.aborted = aborted
        self.iteration: RunningBatch | None = None
        self.batch: Batch | None = None

    @property
    def size(self) -> int:
        """Sequences that decode in it, or will."""
        queues = self.queues
        return queues.ready.size + queues.decoding.size + queues.paused.size

    def holds(self, line: SequenceQueue | None) -> bool:
        """Whether `line` is one of its own, which the line of waiting prompts is not."""
        queues = self.queues
        return (
            line is queues.decoding
            or line is queues.ready
            or line is queues.prefilling
            or line is queues.paused
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class PipelineScheduler(InstanceScheduler):
    """An `InstanceScheduler` with up to `stages` iterations under way, which end in the order in which they started.

    `start` takes the lane that has rested longest and has something to run; `advance` and `complete` are for the
    oldest iteration under way. Every iteration is started by itself. `max_num_seqs` is of one iteration.
    """

    def __init__(
        self,
        batcher: Batcher,
        blocks: BlockAllocator,
        leases: LeaseTable,
        max_num_seqs: int,
        stages: int,
        memory: KvReservation = FULL_RESERVATION,
    ) -> None:
        super().__init__(batcher, blocks, leases, max_num_seqs, memory)
        self._lane = Lane(0, self._queues, self._aborted_in_batch)
        self._lanes = [self._lane]
        for number in range(1, stages):
            queues = Queues()
            queues.waiting = self._queues.waiting
            self._lanes.append(Lane(number, queues, []))
        self._resting = list(self._lanes)
        self._under_way: list[Lane] = []

    @property
    def lane(self) -> int:
        """Whose iteration was started, or accounted for, last."""
        return self._lane.number

    # -- iterations -------------------------------------------------------------------------------------------

    def start(self, now: float) -> RunningBatch | None:
        for lane in self._resting:
            self._turn_to(lane)
            self._standing = 0
            iteration = super().start(now)
            if iteration is not None:
                iteration.limit = self._standing = 1
                self._resting.remove(lane)
                self._under_way.append(lane)
                return iteration
        return None

    def advance(self, iterations: int = 1) -> list[StepResult]:
        self._turn_to_oldest()
        return super().advance(iterations)

    def complete(self, batch: Batch, stopped: Collection[str] = ()) -> list[Outcome]:
        self._turn_to_oldest()
        return super().complete(batch, stopped)

    def abort(self, request_id: str) -> None:
        sequence = self._here.get(request_id)
        if sequence is not None:
            self._turn_to_lane_of(sequence)
        super().abort(request_id)

    def _turn_to_lane_of(self, sequence: ScheduledSequence) -> None:
        for lane in self._lanes:
            if lane.holds(sequence.line):
                self._turn_to(lane)

    def _turn_to_oldest(self) -> None:
        if not self._under_way:
            raise RuntimeError("only what was started can be accounted for")
        lane = self._under_way.pop(0)
        self._resting.append(lane)
        self._turn_to(lane)

    def _turn_to(self, lane: Lane) -> None:
        """What is done from now on is done for this lane."""
        last = self._lane
        last.iteration, last.batch = self._iteration, self._batch
        self._lane = lane
        self._queues, self._aborted_in_batch = lane.queues, lane.aborted
        self._iteration, self._batch = lane.iteration, lane.batch

    # -- queues -----------------------------------------------------------------------------------------------

    def _first_token(self, sequence: ScheduledSequence, stopped: bool) -> StepResult:
        step = super()._first_token(sequence, stopped)
        ready = self._queues.ready
        if sequence.line is ready:
            ready.remove(sequence)
            self._emptiest().queues.ready.append(sequence)
        return step

    def _queue(self, sequence: ScheduledSequence, line: SequenceQueue) -> None:
        if line is self._queues.ready:
            line = self._emptiest().queues.ready
        line.append(sequence)
        self._batcher.queued(sequence)
        self.changed = True

    def _emptiest(self) -> Lane:
        """The first of the lanes with the fewest sequences."""
        found = self._lanes[0]
        for lane in self._lanes:
            if lane.size < found.size:
                found = lane
        return found

    def _room_made(self) -> None:
        for lane in self._lanes:
            if not lane.queues.settled:
                self.changed = True

    # -- accounts ---------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        waiting = self._queues.waiting.size
        for lane in self._lanes:
            waiting += lane.queues.ready.size + lane.queues.paused.size
        return waiting

    @property
    def empty(self) -> bool:
        if self._fetching.size:
            return False
        return all(lane.queues.settled and not lane.queues.decoding.size for lane in self._lanes)

    def _started(self) -> int:
        return sum(lane.queues.started for lane in self._lanes)


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkedPipelineScheduler(PipelineScheduler):
    """A `PipelineScheduler` in which a prompt may be in several iterations under way, a chunk in each.

    Decodes stay in their lanes, as they do there.
    """

    def __init__(
        self,
        batcher: Batcher,
        blocks: BlockAllocator,
        leases: LeaseTable,
        max_num_seqs: int,
        stages: int,
        memory: KvReservation = FULL_RESERVATION,
    ) -> None:
        super().__init__(batcher, blocks, leases, max_num_seqs, stages, memory)
        self._prefilling = self._queues.prefilling
        for lane in self._lanes:
            lane.queues.prefilling = self._prefilling

    def start(self, now: float) -> RunningBatch | None:
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
