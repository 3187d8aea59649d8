"""The sequences of an instance that decode: each makes one token in every iteration.

Advancing the set by any number of iterations takes the time of the sequences that end, not of those that go
on: progress is counted once for the whole set, and sequences wait in a heap for the iteration that ends them.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from twofold.batch import BatchItem
from twofold.request import Phase
from twofold.scheduling.sequence import ScheduledSequence


class DecodeSet:
    """Members in the order in which they joined, `size` of them; `context_tokens` is the KV that an iteration reads."""

    def __init__(self) -> None:
        self.iterations = 0
        self.size = 0
        self.context_tokens = 0
        self._members: dict[str, ScheduledSequence] = {}
        self._ends: list[tuple[int, int, ScheduledSequence]] = []
        self._joins = 0

    def __len__(self) -> int:
        return self.size

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return iter(self._members.values())

    def get(self, request_id: str) -> ScheduledSequence | None:
        return self._members.get(request_id)

    def last(self, count: int) -> list[ScheduledSequence]:
        """The `count` members that joined last, latest first."""
        latest = reversed(self._members.values())
        return [next(latest) for _ in range(count)]

    def join(self, sequence: ScheduledSequence) -> None:
        self._joins += 1
        sequence.joined_at = self.iterations
        sequence.join_number = self._joins
        self._members[sequence.id] = sequence
        self.size += 1
        self.context_tokens += sequence.computed
        end = self.iterations + sequence.output_tokens - sequence.generated
        heappush(self._ends, (end, self._joins, sequence))

    def leave(self, sequence: ScheduledSequence) -> None:
        """The sequence stops decoding, now or for good, and knows its own progress again."""
        done = self.iterations - sequence.joined_at
        sequence.computed += done
        sequence.generated += done
        sequence.join_number = -1
        self.context_tokens -= sequence.computed
        del self._members[sequence.id]
        self.size -= 1
        if len(self._ends) > 2 * self.size + 16:  # keep entries of those who left from piling up
            self._ends = [entry for entry in self._ends if entry[2].join_number == entry[1]]
            heapify(self._ends)

    def advance(self, iterations: int) -> list[ScheduledSequence]:
        """Every member makes `iterations` tokens; those whose output is then complete leave and are returned.

        `iterations` may not exceed `iterations_to_end`: nobody can make more tokens than were asked for.
        """
        self.iterations = now = self.iterations + iterations
        self.context_tokens += iterations * self.size
        ends, ended = self._ends, []
        while ends and ends[0][0] <= now:
            _, number, sequence = heappop(ends)
            if sequence.join_number == number:
                ended.append(sequence)
        for sequence in ended:
            self.leave(sequence)
        return ended

    def iterations_to_end(self) -> int:
        """After how many iterations the first member ends; 0 when there is none."""
        ends = self._ends
        while ends and ends[0][2].join_number != ends[0][1]:
            heappop(ends)
        return ends[0][0] - self.iterations if ends else 0

    def generated(self, sequence: ScheduledSequence) -> int:
        """Output tokens that a member has made so far."""
        return sequence.generated + self.iterations - sequence.joined_at

    def items(self) -> list[BatchItem]:
        """One more output token of each member, as work for an iteration."""
        now = self.iterations
        return [
            BatchItem(s.id, Phase.DECODE, 1, s.computed + now - s.joined_at, True)
            for s in self._members.values()
        ]
