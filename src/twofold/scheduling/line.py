"""A line of sequences that wait for the same thing."""

from collections.abc import Iterator

from twofold.scheduling.sequence import ScheduledSequence


class Line:
    """Sequences in order of entry, `size` of them. Each knows who stands beside it, so that any can leave at once.

    A sequence stands in one line at a time.
    """

    def __init__(self) -> None:
        self.size = 0
        self.first: ScheduledSequence | None = None
        self.last: ScheduledSequence | None = None

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[ScheduledSequence]:
        sequence = self.first
        while sequence is not None:
            yield sequence
            sequence = sequence.after

    def append(self, sequence: ScheduledSequence) -> None:
        if sequence.line is not None:
            raise ValueError(f"{sequence.id} stands in a line already")
        last = self.last
        if last is None:
            self.first = sequence
        else:
            last.after = sequence
            sequence.before = last
        self.last = sequence
        sequence.line = self
        self.size += 1

    def prepend(self, sequence: ScheduledSequence) -> None:
        """Let a sequence in before all others."""
        first = self.first
        if first is None:
            self.append(sequence)
            return
        if sequence.line is not None:
            raise ValueError(f"{sequence.id} stands in a line already")
        self.first = first.before = sequence
        sequence.after = first
        sequence.line = self
        self.size += 1

    def remove(self, sequence: ScheduledSequence) -> None:
        if sequence.line is not self:
            raise ValueError(f"{sequence.id} does not stand in this line")
        before, after = sequence.before, sequence.after
        if before is None:
            self.first = after
        else:
            before.after = after
        if after is None:
            self.last = before
        else:
            after.before = before
        sequence.before = sequence.after = sequence.line = None
        self.size -= 1
