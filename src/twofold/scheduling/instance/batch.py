"""What an instance runs: an iteration, and what it does for the sequences in it."""

from mypy_extensions import mypyc_attr

from twofold.request import FinishReason
from twofold.scheduling.instance.sequence import PrefillChunk, ScheduledSequence


@mypyc_attr(free_list_len=1)
class RunningBatch:
    """An iteration under way: what it computes, and how often it may be run as it is.

    `limit` is 1 with a prompt in it; without, it is the number of iterations until the first decode ends.
    `joined` are sequences whose first decode iteration this is, or the first after a pause; `paused` those that
    were running and are not.
    """

    __slots__ = (
        "context_tokens",
        "decode_sequences",
        "joined",
        "limit",
        "paused",
        "prefill_sequences",
        "prefill_tokens",
        "prefills",
    )

    def __init__(
        self,
        prefills: list[PrefillChunk],
        prefill_tokens: int,
        prefill_sequences: int,
        decode_sequences: int,
        context_tokens: int,
        limit: int,
        joined: list[ScheduledSequence] | None = None,
        paused: list[ScheduledSequence] | None = None,
    ) -> None:
        self.prefills = prefills
        self.prefill_tokens = prefill_tokens
        self.prefill_sequences = prefill_sequences
        self.decode_sequences = decode_sequences
        self.context_tokens = context_tokens
        self.limit = limit
        self.joined: list[ScheduledSequence] = [] if joined is None else joined
        self.paused: list[ScheduledSequence] = [] if paused is None else paused


@mypyc_attr(free_list_len=1)
class StepResult:
    """A sequence sampled output token `index`, for which something else comes next: it ends, or goes on elsewhere
    or otherwise."""

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
