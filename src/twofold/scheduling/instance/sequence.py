"""What an instance's scheduler knows of one request.

A line of sequences that wait for the same thing.
"""

from collections.abc import Iterator

from mypy_extensions import i64, mypyc_attr

from twofold.batch import BatchItem
from twofold.kvcache.allocator import BlockAllocation
from twofold.request import Phase, Request


@mypyc_attr(allow_interpreted_subclasses=True)
class Note:
    """What a batcher keeps of a sequence; one that keeps something extends this with what it is."""


@mypyc_attr(free_list_len=1)
class ScheduledSequence:
    """Progress of a request on one instance.

    `computed` counts tokens whose KV is in this instance's cache, `generated` output tokens so far wherever
    they were made; while the sequence decodes, both stand as they were when it joined the decode set, which
    keeps count from there. `decodes_here` is False on an instance that prefills and then hands off.
    `start_tokens` and `decode_tokens` say how much KV memory it takes when (see `MemoryRule`), `grant` which it has.

    Where memory grows, `number` says as the how-manieth it got some, from 1 on, and `swapped` what it has on the host
    while it has none here.

    Where prompts find what others have computed, `reused_tokens` of it were found, and `copy` names a block (from, to)
    that is to be copied before its first iteration.

    What it waits for is the `line` it stands in; without one it is done, though its KV may still be on its way
    from here (`handing_off`) or to here. `note` is its batcher's.
    """

    # The lines' own: who stands before and after it. The decode set's own: at which of its iterations this sequence
    # joined, as the how-manieth, and at which it ends. For the driver: when it last gave a token, on its clock.
    __slots__ = (
        "after",
        "before",
        "computed",
        "copy",
        "decode_tokens",
        "decodes_here",
        "end",
        "fetching",
        "generated",
        "grant",
        "handing_off",
        "id",
        "join_number",
        "joined_at",
        "last_token_at",
        "line",
        "note",
        "number",
        "output_tokens",
        "prompt_tokens",
        "request",
        "reused_tokens",
        "source",
        "start_tokens",
        "swapped",
    )

    def __init__(
        self,
        request: Request,
        decodes_here: bool,
        start_tokens: int = 0,
        decode_tokens: int = 0,
        computed: int = 0,
        generated: int = 0,
    ) -> None:
        self.request = request
        # Again what the request says, because they are asked for at every step.
        self.id = request.id
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.decodes_here = decodes_here
        self.start_tokens = start_tokens
        self.decode_tokens = decode_tokens
        self.computed = computed
        self.generated = generated
        self.grant: BlockAllocation | None = None
        self.reused_tokens = 0
        self.copy: tuple[int, int] | None = None
        self.handing_off = False
        self.fetching = False  # some of what it reuses is on its way
        self.source = ""  # who sends its KV, if it is prefilled elsewhere
        self.note: Note | None = None
        self.number = 0
        self.swapped: BlockAllocation | None = None
        self.line: SequenceQueue | None = None
        self.before: ScheduledSequence | None = None
        self.after: ScheduledSequence | None = None
        self.joined_at = 0
        self.join_number: i64 = 0
        self.end: i64 = 0
        self.last_token_at = 0

    @property
    def prefill_remaining(self) -> int:
        """Prompt tokens still to be computed."""
        return max(0, self.prompt_tokens - self.computed)

    def prefill(self, num_tokens: int) -> "PrefillChunk":
        """The next `num_tokens` tokens of the prompt as work for an iteration."""
        completes = num_tokens == self.prompt_tokens - self.computed
        return PrefillChunk(self, num_tokens, self.computed, completes)


@mypyc_attr(free_list_len=1)
class PrefillChunk:
    """A prompt's part in an iteration: what its `BatchItem` says, and whose it is."""

    __slots__ = ("context_tokens", "num_tokens", "samples", "sequence")

    def __init__(
        self, sequence: ScheduledSequence, num_tokens: int, context_tokens: int, samples: bool
    ) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.context_tokens = context_tokens
        self.samples = samples

    @property
    def request_id(self) -> str:
        return self.sequence.id

    def item(self) -> BatchItem:
        return BatchItem(self.sequence.id, Phase.PREFILL, self.num_tokens, self.context_tokens, self.samples)


class SequenceQueue:
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
