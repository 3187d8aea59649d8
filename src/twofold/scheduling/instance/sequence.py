"""A request on one instance: its KV reservation, prompt chunks and queue."""

from collections.abc import Iterator
from typing import Any

from mypy_extensions import i64, mypyc_attr

from twofold.batch import BatchItem
from twofold.kvcache.allocator import BlockAllocation
from twofold.request import Phase, Request


class KvReservation:
    """Rule for reserving KV tokens. By default, for prompt and output together: an admitted request finishes."""

    def __init__(self, output_at_decode_start: bool = False, extra: int = 0, step: int = 0) -> None:
        self.output_at_decode_start = output_at_decode_start  # reserve the output then; the request may have to wait
        self.extra = extra  # tokens added to every prompt
        self.step = step  # if set, tokens per step of the output (swap preemption)

    def at_start(self, prompt: int, output: int, decodes_here: bool) -> int:
        """Return the number of KV tokens to reserve before an instance computes or receives a request's KV cache."""
        if self.output_at_decode_start or not decodes_here:
            return prompt + self.extra
        if self.step:
            return prompt + min(self.step, output - 1) + self.extra
        return prompt + output - 1 + self.extra

    def at_decode_start(self, output: int) -> int:
        """Return the number of additional tokens to reserve at the first decode iteration."""
        return output - 1 if self.output_at_decode_start else 0

    def in_all(self, prompt: int, output: int) -> int:
        """Return the most KV tokens that a decode instance ever reserves for one request."""
        return prompt + output - 1 + self.extra


FULL_RESERVATION = KvReservation()


@mypyc_attr(free_list_len=1)
class ScheduledSequence:
    """Progress of a request on one instance."""

    __slots__ = (
        *("request", "id", "prompt_tokens", "output_tokens", "decodes_here", "source"),
        *("start_tokens", "decode_tokens", "computed", "generated", "reused_tokens", "allocation", "swapped", "copy"),
        *("handing_off", "fetching", "admission", "batcher_state"),
        *("queue", "previous", "next", "joined_at", "join_number", "end", "last_token_at"),
    )

    def __init__(self, request: Request, decodes_here: bool, computed: int = 0, generated: int = 0) -> None:
        self.request = request
        # Copied from the request because every step reads them.
        self.id = request.id
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.decodes_here = decodes_here  # False if it is handed off after prefill
        self.start_tokens = self.decode_tokens = 0  # reserved at the start and at the first decode (`KvReservation`)
        # Both are updated only when the sequence leaves a `DecodeSet`.
        self.computed = computed  # tokens with KV on this instance
        self.generated = generated  # output tokens
        self.allocation: BlockAllocation | None = None
        self.batcher_state: Any = None  # set by the batcher, if it keeps state for each sequence
        self.reused_tokens = 0  # prompt tokens found in the prefix cache
        self.copy: tuple[int, int] | None = None  # (source, target) blocks to copy before the first iteration
        self.handing_off = False  # a hand-off reads its KV, perhaps after it has finished on this instance
        self.fetching = False  # cached KV of its prefix is still being fetched
        self.source = ""  # the instance that prefills it, if not this one
        self.admission = 0  # number from 1 under swap preemption
        self.swapped: BlockAllocation | None = None  # host blocks while it is swapped out
        self.queue: SequenceQueue | None = None  # None after it has finished on this instance
        self.previous: ScheduledSequence | None = None  # neighbours in the queue
        self.next: ScheduledSequence | None = None
        # Set by `DecodeSet`: iteration and sequence number of joining, and iteration of ending.
        self.joined_at = 0
        self.join_number: i64 = 0
        self.end: i64 = 0
        self.last_token_at = 0  # set by the driver, on its clock

    @property
    def prefill_remaining(self) -> int:
        """Number of prompt tokens still to compute."""
        return max(0, self.prompt_tokens - self.computed)

    def prefill(self, num_tokens: int) -> "PrefillChunk":
        """Return the next `num_tokens` prompt tokens as a chunk for a batch."""
        completes = num_tokens == self.prompt_tokens - self.computed
        return PrefillChunk(self, num_tokens, self.computed, completes)


@mypyc_attr(acyclic=True, free_list_len=1)
class PrefillChunk:
    """Part of a prompt in a batch: `num_tokens` new tokens, after `context_tokens` tokens already in the cache."""

    __slots__ = ("context_tokens", "num_tokens", "samples", "sequence")

    def __init__(self, sequence: ScheduledSequence, num_tokens: int, context_tokens: int, samples: bool) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.context_tokens = context_tokens
        self.samples = samples  # True for the last chunk, after which the first output token is sampled

    def item(self) -> BatchItem:
        """Return the chunk as a batch item that can be sent to a worker."""
        return BatchItem(self.sequence.id, Phase.PREFILL, self.num_tokens, self.context_tokens, self.samples)


class SequenceQueue:
    """Linked list of sequences, with removal in constant time. A sequence is in at most one queue."""

    def __init__(self) -> None:
        self.size = 0
        self.first: ScheduledSequence | None = None
        self.last: ScheduledSequence | None = None

    def __iter__(self) -> Iterator[ScheduledSequence]:
        sequence = self.first
        while sequence is not None:
            yield sequence
            sequence = sequence.next

    def append(self, sequence: ScheduledSequence) -> None:
        if sequence.queue is not None:
            raise ValueError(f"{sequence.id} is in a queue already")
        last = self.last
        if last is None:
            self.first = sequence
        else:
            last.next = sequence
            sequence.previous = last
        self.last = sequence
        sequence.queue = self
        self.size += 1

    def prepend(self, sequence: ScheduledSequence) -> None:
        first = self.first
        if first is None:
            self.append(sequence)
            return
        if sequence.queue is not None:
            raise ValueError(f"{sequence.id} is in a queue already")
        self.first = first.previous = sequence
        sequence.next = first
        sequence.queue = self
        self.size += 1

    def remove(self, sequence: ScheduledSequence) -> None:
        if sequence.queue is not self:
            raise ValueError(f"{sequence.id} is not in this queue")
        previous, following = sequence.previous, sequence.next
        if previous is None:
            self.first = following
        else:
            previous.next = following
        if following is None:
            self.last = previous
        else:
            following.previous = previous
        sequence.previous = sequence.next = sequence.queue = None
        self.size -= 1
