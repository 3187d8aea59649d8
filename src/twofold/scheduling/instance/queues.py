"""The queues of an instance by state (waiting, prefilling, decoding), the running batch and its results."""

from typing import Final

from mypy_extensions import i64, mypyc_attr

from twofold.batch import Batch, BatchItem
from twofold.kvcache.allocator import BlockAllocation
from twofold.request import FinishReason, Phase
from twofold.scheduling.instance.sequence import PrefillChunk, ScheduledSequence, SequenceQueue


@mypyc_attr(free_list_len=1)
class SchedulerOutput:
    """Changes with the next batch: its prefill chunks, the decodes that start or resume, and the decodes to preempt.

    All other running decodes continue. If `repeatable` is False, the batcher selects again after one iteration, so that
    the sequences left out of this batch can run.
    """

    def __init__(
        self, prefills: list[PrefillChunk] | None = None, resume: list[ScheduledSequence] | None = None
    ) -> None:
        self.prefills: list[PrefillChunk] = [] if prefills is None else prefills
        self.resume: list[ScheduledSequence] = [] if resume is None else resume
        self.pause: list[ScheduledSequence] = []
        self.repeatable = True


_UNCHANGED: Final = SchedulerOutput()


@mypyc_attr(free_list_len=1)
class RunningBatch:
    """A batch under way on a lane, and the number of iterations it may run unchanged.

    `limit` is 1 for a batch with prefills, else the number of iterations until the first decode ends. `joined` lists
    the sequences that start or resume decoding with this batch, `paused` the decodes it preempted.
    """

    def __init__(self, changes: SchedulerOutput, decodes: int, context_tokens: int, limit: int, lane: int = 0) -> None:
        self.prefills = prefills = changes.prefills
        self.joined, self.paused = changes.resume, changes.pause
        self.prefill_tokens = 0
        for chunk in prefills:
            self.prefill_tokens += chunk.num_tokens
        self.prefill_sequences = len(prefills)
        self.decode_sequences = decodes
        self.context_tokens = context_tokens
        self.limit = limit
        self.lane = lane


@mypyc_attr(free_list_len=1)
class StepResult:
    """The output token `index` of a sequence, and whether the sequence ends, is handed off or continues.

    `finish_reason` is set if the sequence ends. `complete` reports every sampled token; `advance` only those after
    which the sequence ends, is handed off or stops decoding.
    """

    def __init__(
        self, sequence: ScheduledSequence, index: int, finish_reason: FinishReason | None, hands_off: bool
    ) -> None:
        self.sequence = sequence
        self.index = index
        self.finish_reason = finish_reason
        self.hands_off = hands_off

    @property
    def request_id(self) -> str:
        return self.sequence.id


_UNBOUNDED: Final = 1 << 60


class DecodeSet(SequenceQueue):
    """Sequences that make one token each per iteration, in the order in which they joined.

    Advancing the set by any number of iterations takes time only for the sequences that end: progress is counted once
    for the set, and `_ends` is sorted by the iteration of ending. `context_tokens` is the KV read by one iteration.
    """

    def __init__(self) -> None:
        super().__init__()
        self.iterations = 0
        self.context_tokens = 0
        self._ends: list[ScheduledSequence] = []  # the next to end is last
        self._joins = 0

    def latest(self, count: int) -> list[ScheduledSequence]:
        """Return the `count` sequences that joined last, the latest first."""
        members: list[ScheduledSequence] = []
        sequence = self.last
        while sequence is not None and len(members) < count:
            members.append(sequence)
            sequence = sequence.previous
        return members

    def join(self, sequence: ScheduledSequence, most: int = _UNBOUNDED) -> None:
        """Add a sequence, which decodes until its output is complete, but for at most `most` iterations."""
        self.append(sequence)
        self._joins += 1
        sequence.joined_at = self.iterations
        sequence.join_number = self._joins
        left = sequence.output_tokens - sequence.generated
        sequence.end = self.iterations + min(most, left)
        self.context_tokens += sequence.computed
        self._ends.insert(self._place(sequence), sequence)

    def remove(self, sequence: ScheduledSequence) -> None:
        """Remove a sequence from the set and update its progress."""
        super().remove(sequence)
        self._ends.pop(self._place(sequence))
        self._update(sequence)

    def advance(self, iterations: int) -> list[ScheduledSequence]:
        """Make `iterations` tokens for every member; remove and return the members that are then at their end.

        `iterations` must not exceed `iterations_to_end`.
        """
        self.iterations += iterations
        self.context_tokens += iterations * self.size
        now: i64 = self.iterations
        ends = self._ends
        ended: list[ScheduledSequence] = []
        while ends and ends[-1].end <= now:
            sequence = ends.pop()
            super().remove(sequence)
            self._update(sequence)
            ended.append(sequence)
        return ended

    def iterations_to_end(self) -> int:
        """Number of iterations until the first member ends; 0 without members."""
        return self._ends[-1].end - self.iterations if self._ends else 0

    def generated(self, sequence: ScheduledSequence) -> int:
        """Return the number of output tokens that a member has made so far."""
        return sequence.generated + self.iterations - sequence.joined_at

    def items(self) -> list[BatchItem]:
        """Return the batch items of one iteration: one token of each member."""
        now = self.iterations
        return [BatchItem(s.id, Phase.DECODE, 1, s.computed + now - s.joined_at, True) for s in self]

    def _update(self, sequence: ScheduledSequence) -> None:
        done = self.iterations - sequence.joined_at
        sequence.computed += done
        sequence.generated += done
        self.context_tokens -= sequence.computed

    def _place(self, sequence: ScheduledSequence) -> i64:
        """Return the index for a member in `_ends`, sorted by end and then by joining, both descending."""
        ends, end, number = self._ends, sequence.end, sequence.join_number
        low: i64 = 0
        high: i64 = len(ends)
        while low < high:
            middle = (low + high) >> 1
            other = ends[middle]
            if other.end > end or (other.end == end and other.join_number > number):
                low = middle + 1
            else:
                high = middle
        return low


class Queues:
    """The queues that a batcher selects from.

    `waiting`: prompts not started. `prefilling`: prompts computed in part. `ready`: sequences with the KV of their
    prompt on this instance but no decode iteration so far. `decoding`: sequences that make one token per iteration.
    `paused`: preempted decodes.
    """

    def __init__(self, waiting: SequenceQueue | None = None, prefilling: SequenceQueue | None = None) -> None:
        self.waiting = SequenceQueue() if waiting is None else waiting
        self.prefilling = SequenceQueue() if prefilling is None else prefilling
        self.ready = SequenceQueue()
        self.decoding = DecodeSet()
        self.paused = SequenceQueue()

    @property
    def decodes(self) -> int:
        """Number of sequences of this lane that decode, or will decode without further prefill."""
        return self.ready.size + self.decoding.size + self.paused.size

    @property
    def started(self) -> int:
        """Number of sequences that count against `max_num_seqs`."""
        return self.prefilling.size + self.ready.size + self.decoding.size + self.paused.size

    @property
    def settled(self) -> bool:
        """Whether every sequence of the instance is decoding."""
        return not (self.waiting.size or self.ready.size or self.prefilling.size or self.paused.size)


class Lane:
    """A lane: the queues of sequences that share batches, and the batch that is running.

    A sequence's next token depends on its last, so it is in one batch at a time. An instance with pipeline stages
    therefore divides its sequences among as many lanes, each of which has one batch in the pipeline; any other
    instance has one lane.

    `remaining` is the number of iterations for which the last selection still holds. `message` is the running batch
    as a worker sees it. `aborted` blocks are released when the batch ends. A `single_step` lane runs one iteration a
    batch.
    """

    def __init__(self, number: int, queues: Queues, single_step: bool) -> None:
        self.number = number
        self.queues = queues
        self.single_step = single_step
        self.remaining = 0
        self.batch: RunningBatch | None = None
        self.message: Batch | None = None
        self.aborted: list[BlockAllocation] = []

    def start(self, output: SchedulerOutput | None) -> RunningBatch | None:
        """Start the selected batch; with None, start a batch of all decodes. Return None if there is nothing to run."""
        decoding = self.queues.decoding
        changes, decodes, limit = _UNCHANGED if output is None else output, decoding.size, 1
        if not changes.prefills:
            if not decodes:
                return None
            if changes.repeatable and not self.single_step:
                limit = self.remaining or decoding.iterations_to_end()
        self.remaining = limit
        self.batch = batch = RunningBatch(changes, decodes, decoding.context_tokens, limit, self.number)
        return batch

    def computes(self, sequence: ScheduledSequence) -> bool:
        """Whether the running batch computes tokens of this sequence."""
        if self.batch is None or sequence.queue is self.queues.decoding:
            return self.batch is not None
        return any(chunk.sequence is sequence for chunk in self.batch.prefills)
