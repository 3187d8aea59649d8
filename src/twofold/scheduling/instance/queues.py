"""Queues of the sequences of an instance by state (waiting, prefilling, decoding), running batches and results."""

from typing import Final

from mypy_extensions import i64, mypyc_attr

from twofold.batch import Batch, BatchItem
from twofold.kvcache.allocator import BlockAllocation
from twofold.request import FinishReason, Phase
from twofold.scheduling.instance.sequence import PrefillChunk, ScheduledSequence, SequenceQueue


@mypyc_attr(free_list_len=1)
class SchedulerOutput:
    """A batcher's selection for the next batch: prefill chunks, decodes to start or resume, and decodes to pause.

    All other decodes continue. If `repeatable` is False, the batcher selects again after one iteration, so that the
    sequences left out of this batch can run.
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
    """A running batch of a lane.

    `limit` is the number of iterations for which the batch can run unchanged: 1 with prefills, otherwise the number of
    iterations until the first decode ends. `joined` lists the sequences that start or resume decoding with this batch,
    and `paused` the decodes that were preempted for it.
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
    """Result of an iteration for one sequence.

    `index` is the index of the sequence's newest output token. `finish_reason` is set if the sequence ends, and
    `hands_off` if the sequence is handed off to another instance. `InstanceScheduler.complete` returns a result for
    every sampled token, `InstanceScheduler.advance` only for the first and last tokens of sequences and for decodes
    that were paused.
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
    """The decoding sequences of a lane, in the order in which they joined. Each generates one token per iteration.

    The cost of `advance` depends only on the number of sequences that end, because progress is counted once for the
    whole set. `context_tokens` is the number of KV tokens that one iteration reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.iterations = 0
        self.context_tokens = 0
        self._ends: list[ScheduledSequence] = []  # by iteration of ending, the next to end last
        self._joins = 0

    def latest(self, count: int) -> list[ScheduledSequence]:
        """Return the `count` most recently joined sequences, the most recent first."""
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
        """Remove a sequence from the set, and update its `computed` and `generated` tokens."""
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
        """Return the number of output tokens that a sequence of the set has generated so far."""
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
        """Return the index of a sequence in `_ends`, which is sorted by end and then join number, both descending."""
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
    """Queues from which a batcher selects.

    `waiting` holds prompts that have not started, and `prefilling` partly computed prompts. `ready` holds sequences
    with complete prompt KV on this instance, which can start or resume decoding. `decoding` holds sequences that
    generate one token per iteration, and `paused` preempted decodes.
    """

    def __init__(self, waiting: SequenceQueue | None = None, prefilling: SequenceQueue | None = None) -> None:
        self.waiting = SequenceQueue() if waiting is None else waiting
        self.prefilling = SequenceQueue() if prefilling is None else prefilling
        self.ready = SequenceQueue()
        self.decoding = DecodeSet()
        self.paused = SequenceQueue()

    @property
    def decodes(self) -> int:
        """Number of sequences in these queues that decode or can decode without further prefill."""
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
    """A group of sequences that share batches: their queues and their running batch.

    A sequence can be in only one running batch, because each token depends on the previous one. An instance with n
    pipeline stages therefore divides its sequences among n lanes, each with one batch in the pipeline. An instance
    without pipeline parallelism has one lane.

    `remaining` is the number of iterations for which the latest selection stays valid. `message` is the running batch
    in the form sent to the worker. `aborted` holds the blocks of requests that were aborted during the running batch;
    the blocks are released when the batch ends. A `single_step` lane runs one iteration per batch.
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
