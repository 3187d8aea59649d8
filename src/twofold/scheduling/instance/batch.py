"""The batch an instance runs, and its results."""

from mypy_extensions import mypyc_attr

from twofold.request import FinishReason
from twofold.scheduling.instance.sequence import PrefillChunk, ScheduledSequence


@mypyc_attr(free_list_len=1)
class RunningBatch:
    """A batch under way on a lane, and the number of iterations it may run unchanged.

    `limit` is 1 with prefills; otherwise the number of iterations until the first decode ends. `joined` lists the
    sequences that start or resume decoding with this batch, `paused` the decodes it preempted.
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
        lane: int = 0,
    ) -> None:
        self.prefills = prefills
        self.prefill_tokens = prefill_tokens
        self.prefill_sequences = prefill_sequences
        self.decode_sequences = decode_sequences
        self.context_tokens = context_tokens
        self.limit = limit
        self.joined: list[ScheduledSequence] = [] if joined is None else joined
        self.paused: list[ScheduledSequence] = [] if paused is None else paused
        self.lane = lane


@mypyc_attr(free_list_len=1)
class StepResult:
    """Output token `index` of a sequence, and what follows: it ends (`finish_reason`), is handed off, or goes on.

    `complete` reports every sampled token; `advance` only those after which the sequence ends, is handed off or stops
    decoding.
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
