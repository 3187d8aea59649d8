"""The sequences of an instance that decode: each makes one token in every iteration.

Advancing the set by any number of iterations takes the time of the sequences that end, not of those that go
on: progress is counted once for the whole set, and sequences are kept in the order in which they end.

The sequences of an instance, by what they wait for.
"""

from typing import Final

from mypy_extensions import i64

from twofold.batch import BatchItem
from twofold.request import Phase
from twofold.scheduling.instance.sequence import ScheduledSequence, SequenceQueue

_EVER: Final = 1 << 60


class DecodeSet(SequenceQueue):
    """Members in the order in which they joined, `size` of them; `context_tokens` is the KV that an iteration reads."""

    def __init__(self) -> None:
        super().__init__()
        self.iterations = 0
        self.context_tokens = 0
        self._ends: list[ScheduledSequence] = []  # those that end first come last
        self._joins = 0

    def latest(self, count: int) -> list[ScheduledSequence]:
        """The `count` members that joined last, latest first."""
        members: list[ScheduledSequence] = []
        sequence = self.last
        while sequence is not None and len(members) < count:
            members.append(sequence)
            sequence = sequence.before
        return members

    def join(self, sequence: ScheduledSequence, most: int = _EVER) -> None:
        """A sequence decodes until its output is complete, or for `most` iterations."""
        self.append(sequence)
        self._joins += 1
        sequence.joined_at = self.iterations
        sequence.join_number = self._joins
        left = sequence.output_tokens - sequence.generated
        sequence.end = self.iterations + min(most, left)
        self.context_tokens += sequence.computed
        self._ends.insert(self._place(sequence), sequence)

    def leave(self, sequence: ScheduledSequence) -> None:
        """The sequence stops decoding, now or for good, and knows its own progress again."""
        self.remove(sequence)
        self._ends.pop(self._place(sequence))
        self._halt(sequence)

    def advance(self, iterations: int) -> list[ScheduledSequence]:
        """Every member makes `iterations` tokens; those that are then at their end leave and are returned.

        `iterations` may not exceed `iterations_to_end`: nobody can make more tokens than were asked for.
        """
        self.iterations += iterations
        self.context_tokens += iterations * self.size
        now: i64 = self.iterations
        ends = self._ends
        ended: list[ScheduledSequence] = []
        while ends and ends[-1].end <= now:
            sequence = ends.pop()
            self.remove(sequence)
            self._halt(sequence)
            ended.append(sequence)
        return ended

    def iterations_to_end(self) -> int:
        """After how many iterations the first member is at its end; 0 when there is none."""
        return self._ends[-1].end - self.iterations if self._ends else 0

    def generated(self, sequence: ScheduledSequence) -> int:
        """Output tokens that a member has made so far."""
        return sequence.generated + self.iterations - sequence.joined_at

    def items(self) -> list[BatchItem]:
        """One more output token of each member, as work for an iteration."""
        now = self.iterations
        return [BatchItem(s.id, Phase.DECODE, 1, s.computed + now - s.joined_at, True) for s in self]

    def _halt(self, sequence: ScheduledSequence) -> None:
        done = self.iterations - sequence.joined_at
        sequence.computed += done
        sequence.generated += done
        self.context_tokens -= sequence.computed

    def _place(self, sequence: ScheduledSequence) -> i64:
        """Where a member is in `_ends`, or belongs: behind those that end later or, together with it, joined later."""
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
    """Lines in order of entry.

    `waiting`: prompts not started. `prefilling`: prompts computed in part. `ready`: the KV cache of the prompt
    is in place and no decode iteration was run yet. `decoding`: one token each in every iteration. `paused`:
    pre-empted decodes, which keep their memory.
    """

    __slots__ = ("decoding", "paused", "prefilling", "ready", "waiting")

    def __init__(self) -> None:
        self.waiting = SequenceQueue()
        self.prefilling = SequenceQueue()
        self.ready = SequenceQueue()
        self.decoding = DecodeSet()
        self.paused = SequenceQueue()

    @property
    def started(self) -> int:
        """Sequences that hold a seat of the running set."""
        return self.prefilling.size + self.ready.size + self.decoding.size + self.paused.size

    @property
    def settled(self) -> bool:
        """Nothing waits for anything but its next decode iteration."""
        return not (self.waiting.size or self.ready.size or self.prefilling.size or self.paused.size)
