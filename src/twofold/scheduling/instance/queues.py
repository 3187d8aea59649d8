"""Data structures of an instance scheduler: queues of sequences by state, running batches, iteration results."""

from typing import Final

from mypy_extensions import i64, mypyc_attr

from twofold.batch import Batch, BatchItem
from twofold.kvcache.allocator import BlockAllocation
from twofold.request import FinishReason, Phase
from twofold.scheduling.instance.sequence import PrefillChunk, ScheduledSequence, SequenceQueue


@mypyc_attr(acyclic=True, free_list_len=1)
class SchedulerOutput:
    """A batcher's selection: prefill chunks, decodes to start or resume, and decodes to pause."""

    __slots__ = ("pause", "prefills", "repeatable", "resume")

    def __init__(
        self, prefills: list[PrefillChunk] | None = None, resume: list[ScheduledSequence] | None = None
    ) -> None:
        self.prefills: list[PrefillChunk] = [] if prefills is None else prefills
        self.resume: list[ScheduledSequence] = [] if resume is None else resume
        self.pause: list[ScheduledSequence] = []  # all other decodes continue
        self.repeatable = True  # if False, the batcher selects again after one iteration


NO_CHANGES: Final = SchedulerOutput()  # all decodes continue


@mypyc_attr(acyclic=True, free_list_len=1)
class RunningBatch:
    """A running batch of an instance. Pipeline parallelism allows one running batch per stage."""

    __slots__ = (
        *("prefills", "prefill_tokens", "prefill_sequences"),
        *("decode_sequences", "context_tokens", "joined", "paused", "limit", "lane"),
    )

    def __init__(self, changes: SchedulerOutput, decodes: int, context_tokens: int, limit: int, lane: int = 0) -> None:
        self.prefills = prefills = changes.prefills
        # Sequences that start or resume decoding, and decodes preempted for this batch.
        self.joined, self.paused = changes.resume, changes.pause
        self.prefill_tokens = 0
        for chunk in prefills:
            self.prefill_tokens += chunk.num_tokens
        self.prefill_sequences = len(prefills)
        self.decode_sequences = decodes
        self.context_tokens = context_tokens
        self.limit = limit  # iterations without change: 1 with prefills, otherwise until the first decode ends
        self.lane = lane


@mypyc_attr(acyclic=True, free_list_len=1)
class StepResult:
    """Result of an iteration for one sequence."""

    __slots__ = ("finish_reason", "hands_off", "index", "sequence")

    def __init__(
        self, sequence: ScheduledSequence, index: int, finish_reason: FinishReason | None, hands_off: bool
    ) -> None:
        self.sequence = sequence
        self.index = index  # of the newest output token
        self.finish_reason = finish_reason  # if the sequence ends
        self.hands_off = hands_off  # to another instance

    @property
    def request_id(self) -> str:
        return self.sequence.id


_UNBOUNDED: Final = 1 << 60


class DecodeSet(SequenceQueue):
    """Set of sequences that decode in the same batches, one token per sequence and iteration."""

    def __init__(self) -> None:
        # Progress is counted once for the whole set, so `advance` costs time only for sequences that end.
        super().__init__()
        self.iterations = 0
        self.context_tokens = 0  # KV tokens that one iteration reads
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
        """Add a sequence to the set, for at most `most` decode iterations."""
        self.append(sequence)
        self._joins += 1
        sequence.joined_at = self.iterations
        sequence.join_number = self._joins
        left = sequence.output_tokens - sequence.generated
        sequence.end = self.iterations + min(most, left)
        self.context_tokens += sequence.computed
        self._ends.insert(self._place(sequence), sequence)

    def remove(self, sequence: ScheduledSequence) -> None:
        """Remove a sequence from the set, and update the sequence's counts of computed and generated tokens."""
        super().remove(sequence)
        self._ends.pop(self._place(sequence))
        self._update(sequence)

    def advance(self, iterations: int) -> list[ScheduledSequence]:
        """Generate `iterations` tokens for every sequence; remove and return the sequences that end."""
        # `iterations` must not exceed `iterations_to_end`.
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
        # `_ends` is sorted by last iteration, then by join number, both descending.
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
    """Queues from which a batcher selects sequences."""

    def __init__(self, waiting: SequenceQueue | None = None, prefilling: SequenceQueue | None = None) -> None:
        self.waiting = SequenceQueue() if waiting is None else waiting  # prompts not started
        self.prefilling = SequenceQueue() if prefilling is None else prefilling  # partly computed prompts
        self.ready = SequenceQueue()  # complete prompt KV, not yet decoding
        self.decoding = DecodeSet()
        self.paused = SequenceQueue()  # preempted decodes

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

    An instance has as many lanes as pipeline stages. Each batch passes through all stages.
    """

    def __init__(self, number: int, queues: Queues, single_step: bool) -> None:
        # A sequence can be in only one batch at a time, so a pipeline divides its sequences among lanes.
        self.number = number
        self.queues = queues
        self.single_step = single_step  # batches have one iteration
        self.remaining = 0  # iterations for which the batcher's selection is valid
        self.batch: RunningBatch | None = None
        self.message: Batch | None = None  # the running batch as sent to the worker
        self.aborted: list[BlockAllocation] = []  # blocks of aborted requests, until the batch ends

    def computes(self, sequence: ScheduledSequence) -> bool:
        """Whether the running batch computes tokens of a sequence."""
        if self.batch is None or sequence.queue is self.queues.decoding:
            return self.batch is not None
        return any(chunk.sequence is sequence for chunk in self.batch.prefills)
