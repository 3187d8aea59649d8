"""Queues of an instance's sequences by state (waiting, prefilling, decoding), running batches and results."""

from typing import Final

from mypy_extensions import i64, mypyc_attr

from twofold.batch import Batch, BatchItem
from twofold.kvcache.allocator import BlockAllocation
from twofold.request import FinishReason, Phase
from twofold.scheduling.instance.sequence import PrefillChunk, ScheduledSequence, SequenceQueue


@mypyc_attr(free_list_len=1)
class SchedulerOutput:
    """A batcher's selection: prefill chunks, decodes to start or resume, and decodes to pause. All other decodes
    continue. If `repeatable` is False, the batcher selects again after one iteration.
    """

    __slots__ = ("pause", "prefills", "repeatable", "resume")

    def __init__(
        self, prefills: list[PrefillChunk] | None = None, resume: list[ScheduledSequence] | None = None
    ) -> None:
        self.prefills: list[PrefillChunk] = [] if prefills is None else prefills
        self.resume: list[ScheduledSequence] = [] if resume is None else resume
        self.pause: list[ScheduledSequence] = []
        self.repeatable = True


NO_CHANGES: Final = SchedulerOutput()  # all decodes continue


@mypyc_attr(free_list_len=1)
class RunningBatch:
    """A running batch of a lane (a group of sequences that share batches). `limit` is the number of iterations for
    which the batch can run unchanged: 1 with prefills, otherwise until the first decode ends. `joined` has the
    sequences that start or resume decoding, and `paused` the decodes preempted for this batch.
    """

    __slots__ = (
        "context_tokens",
        "decode_sequences",
        "joined",
        "lane",
        "limit",
        "paused",
        "prefill_sequences",
        "prefill_tokens",
        "prefills",
    )

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
    """Result of an iteration for one sequence. `index` is the index of the sequence's newest output token.
    `finish_reason` is set if the sequence ends, and `hands_off` if it moves to another instance.
    """

    __slots__ = ("finish_reason", "hands_off", "index", "sequence")

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
    """Decoding sequences that share batches, in order of joining; each generates one token per iteration. Progress is
    counted once for the whole set, so `advance` costs time only for sequences that end. `context_tokens` is the number
    of KV tokens that one iteration reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.iterations = 0
        self.context_tokens = 0
        self._ends: list[ScheduledSequence] = []  # by iteration of ending, the next to end last
        self._joins = 0

    def latest(self, count: int) -> list[ScheduledSequence]:
        """Return the `count` sequences that joined last, latest first."""
        members: list[ScheduledSequence] = []
        sequence = self.last
        while sequence is not None and len(members) < count:
            members.append(sequence)
            sequence = sequence.previous
        return members

    def join(self, sequence: ScheduledSequence, most: int = _UNBOUNDED) -> None:
        """Add a sequence that decodes until its output is complete, but for at most `most` iterations."""
        self.append(sequence)
        self._joins += 1
        sequence.joined_at = self.iterations
        sequence.join_number = self._joins
        left = sequence.output_tokens - sequence.generated
        sequence.end = self.iterations + min(most, left)
        self.context_tokens += sequence.computed
        self._ends.insert(self._place(sequence), sequence)

    def remove(self, sequence: ScheduledSequence) -> None:
        """Remove a sequence, and update its `computed` and `generated` tokens."""
        super().remove(sequence)
        self._ends.pop(self._place(sequence))
        self._update(sequence)

    def advance(self, iterations: int) -> list[ScheduledSequence]:
        """Generate `iterations` tokens for every sequence; remove and return the sequences at their last iteration.
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
        """Number of iterations until the first sequence ends; 0 for an empty set."""
        return self._ends[-1].end - self.iterations if self._ends else 0

    def generated(self, sequence: ScheduledSequence) -> int:
        """Return the number of output tokens that a sequence has generated so far."""
        return sequence.generated + self.iterations - sequence.joined_at

    def items(self) -> list[BatchItem]:
        """Return the batch items of one iteration: one token of each sequence."""
        now = self.iterations
        return [BatchItem(s.id, Phase.DECODE, 1, s.computed + now - s.joined_at, True) for s in self]

    def _update(self, sequence: ScheduledSequence) -> None:
        done = self.iterations - sequence.joined_at
        sequence.computed += done
        sequence.generated += done
        self.context_tokens -= sequence.computed

    def _place(self, sequence: ScheduledSequence) -> i64:
        """Return a sequence's index in `_ends`, sorted by last iteration, then by join number, both descending."""
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
    """Queues from which a batcher selects: `waiting` (prompts not started), `prefilling` (partly computed prompts),
    `ready` (complete prompt KV on this instance, not yet decoding), `decoding`, and `paused` (preempted decodes).
    """

    def __init__(self, waiting: SequenceQueue | None = None, prefilling: SequenceQueue | None = None) -> None:
        self.waiting = SequenceQueue() if waiting is None else waiting
        self.prefilling = SequenceQueue() if prefilling is None else prefilling
        self.ready = SequenceQueue()
        self.decoding = DecodeSet()
        self.paused = SequenceQueue()

    @property
    def decodes(self) -> int:
        """Number of sequences that decode or can decode without further prefill."""
        return self.ready.size + self.decoding.size + self.paused.size

    @property
    def started(self) -> int:
        """Number of started sequences, which count against `max_num_seqs`."""
        return self.prefilling.size + self.ready.size + self.decoding.size + self.paused.size

    @property
    def settled(self) -> bool:
        """Whether all queues except `decoding` are empty."""
        return not (self.waiting.size or self.ready.size or self.prefilling.size or self.paused.size)


class Lane:
    """A group of sequences that share batches, with their queues and their running batch.

    An instance with n pipeline stages divides its sequences among n lanes, each with one batch in the pipeline, because
    a sequence can be in only one batch at a time. Other instances have one lane.

    The batcher's selection is valid for `remaining` iterations. `message` is the running batch as sent to the worker.
    `aborted` holds blocks of aborted requests until the batch ends. Batches of a `single_step` lane have one iteration.
    """

    def __init__(self, number: int, queues: Queues, single_step: bool) -> None:
        self.number = number
        self.queues = queues
        self.single_step = single_step
        self.remaining = 0
        self.batch: RunningBatch | None = None
        self.message: Batch | None = None
        self.aborted: list[BlockAllocation] = []

    def computes(self, sequence: ScheduledSequence) -> bool:
        """Whether the running batch computes tokens of a sequence."""
        if self.batch is None or sequence.queue is self.queues.decoding:
            return self.batch is not None
        return any(chunk.sequence is sequence for chunk in self.batch.prefills)
