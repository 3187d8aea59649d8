"""The queues of an instance: what waits, what is being prefilled, and the set that decodes."""

from typing import Final

from mypy_extensions import i64

from twofold.batch import BatchItem
from twofold.request import Phase
from twofold.scheduling.instance.sequence import ScheduledSequence, SequenceQueue

_UNBOUNDED: Final = 1 << 60


class DecodeSet(SequenceQueue):
    """Sequences that make one token each per iteration, in the order in which they joined.

    Advancing the set by any number of iterations costs the sequences that end: progress is counted once for the set,
    and `_ends` is sorted by the iteration of ending. `context_tokens` is the KV read by one iteration.
    """

    def __init__(self) -> None:
        super().__init__()
        self.iterations = 0
        self.context_tokens = 0
        self._ends: list[ScheduledSequence] = []  # the next to end is last
        self._joins = 0

    def latest(self, count: int) -> list[ScheduledSequence]:
        """The `count` sequences that joined last, latest first."""
        members: list[ScheduledSequence] = []
        sequence = self.last
        while sequence is not None and len(members) < count:
            members.append(sequence)
            sequence = sequence.previous
        return members

    def join(self, sequence: ScheduledSequence, most: int = _UNBOUNDED) -> None:
        """Decode a sequence until its output is complete, or for `most` iterations."""
        self.append(sequence)
        self._joins += 1
        sequence.joined_at = self.iterations
        sequence.join_number = self._joins
        left = sequence.output_tokens - sequence.generated
        sequence.end = self.iterations + min(most, left)
        self.context_tokens += sequence.computed
        self._ends.insert(self._place(sequence), sequence)

    def remove(self, sequence: ScheduledSequence) -> None:
        """Stop decoding a sequence and update its progress."""
        super().remove(sequence)
        self._ends.pop(self._place(sequence))
        self._update(sequence)

    def advance(self, iterations: int) -> list[ScheduledSequence]:
        """Make `iterations` tokens for every member; remove and return the members at their end.

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
        """Iterations until the first member ends; 0 without members."""
        return self._ends[-1].end - self.iterations if self._ends else 0

    def generated(self, sequence: ScheduledSequence) -> int:
        """Output tokens that a member has made so far."""
        return sequence.generated + self.iterations - sequence.joined_at

    def items(self) -> list[BatchItem]:
        """One token of each member, as messages."""
        now = self.iterations
        return [BatchItem(s.id, Phase.DECODE, 1, s.computed + now - s.joined_at, True) for s in self]

    def _update(self, sequence: ScheduledSequence) -> None:
        done = self.iterations - sequence.joined_at
        sequence.computed += done
        sequence.generated += done
        self.context_tokens -= sequence.computed

    def _place(self, sequence: ScheduledSequence) -> i64:
        """Index in `_ends`: sorted by end, then by joining, both descending."""
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

    `waiting`: prompts not started. `prefilling`: prompts computed in part. `ready`: the prompt's KV is in place, no
    decode iteration has run. `decoding`: one token each per iteration. `paused`: preempted decodes.
    """

    __slots__ = ("decoding", "paused", "prefilling", "ready", "waiting")

    def __init__(self, waiting: SequenceQueue | None = None, prefilling: SequenceQueue | None = None) -> None:
        self.waiting = SequenceQueue() if waiting is None else waiting
        self.prefilling = SequenceQueue() if prefilling is None else prefilling
        self.ready = SequenceQueue()
        self.decoding = DecodeSet()
        self.paused = SequenceQueue()

    @property
    def decodes(self) -> int:
        """Sequences that decode, or will without further prefill."""
        return self.ready.size + self.decoding.size + self.paused.size

    @property
    def started(self) -> int:
        """Sequences that count against `max_num_seqs`."""
        return self.prefilling.size + self.ready.size + self.decoding.size + self.paused.size

    @property
    def settled(self) -> bool:
        """Whether every sequence is decoding."""
        return not (self.waiting.size or self.ready.size or self.prefilling.size or self.paused.size)
