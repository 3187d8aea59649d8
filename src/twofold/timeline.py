"""The timeline of a request and the definition of every latency.

The diagram shows the moments of a request from top to bottom. In this example, the KV cache is sent layer by
layer during prefill.

    ARRIVED          ┐
    ROUTED           │ queue_prefill
    PREFILL_STARTED  ┤
    HANDOFF_STARTED  │ prefill         ┐
    FIRST_TOKEN      ┘                 │ transfer
    HANDOFF_ENDED    ┐                 ┘
                     │ queue_decode
    DECODE_STARTED   ┤
                     │ decode
    LAST_TOKEN       ┘

    TTFT             = FIRST_TOKEN − ARRIVED
    E2E              = LAST_TOKEN − ARRIVED
    TPOT             = (LAST_TOKEN − FIRST_TOKEN) / (n − 1)    for n output tokens; undefined for n = 1
    ITL, TBT         = gap between consecutive tokens          n − 1 gaps
    queue            = queue_prefill + queue_decode            time in queues, without transfer
    transfer         = HANDOFF_ENDED − HANDOFF_STARTED         transfer of the KV cache
    visible transfer = max(0, HANDOFF_ENDED − FIRST_TOKEN)     part of the transfer after the first token
    first gap        = SECOND TOKEN − FIRST_TOKEN              see `RequestTimings` for the parts of TTFT and first gap

Times are seconds on one monotonic clock. queue_decode starts at FIRST_TOKEN or HANDOFF_ENDED, whichever is
later; without a hand-off, at FIRST_TOKEN.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from twofold.request import FinishReason, Request, RequestTimings


class Moment(StrEnum):
    """Enum of the events in a request's timeline, from arrival to the last token."""

    ARRIVED = "arrived"
    ROUTED = "routed"
    PREFILL_STARTED = "prefill_started"
    HANDOFF_STARTED = "handoff_started"
    FIRST_TOKEN = "first_token"
    HANDOFF_ENDED = "handoff_ended"
    DECODE_STARTED = "decode_started"
    LAST_TOKEN = "last_token"


@dataclass(slots=True)
class Timeline:
    """Times of a request's events and output tokens, in seconds. In simulations, `token_times_s` is empty."""

    request: Request
    moments: dict[Moment, float] = field(default_factory=dict)
    token_times_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    finish_reason: FinishReason | None = None
    prefill_instance: str | None = None
    decode_instance: str | None = None
    preemptions: int = 0
    cached_tokens: int = 0  # of the prompt, in a prefix cache

    def span(self, start: Moment, end: Moment) -> float | None:
        """Return the seconds between two moments of the request, or None if either was not recorded."""
        if start not in self.moments or end not in self.moments:
            return None
        return self.moments[end] - self.moments[start]

    @property
    def complete(self) -> bool:
        """Whether the request ended with a complete output."""
        return self.finish_reason is not None and self.finish_reason.complete

    @property
    def ttft_s(self) -> float | None:
        return self.span(Moment.ARRIVED, Moment.FIRST_TOKEN)

    @property
    def e2e_s(self) -> float | None:
        return self.span(Moment.ARRIVED, Moment.LAST_TOKEN)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies in seconds: n − 1 for n tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def tpot_s(self) -> float | None:
        if self.output_tokens < 2:
            return None
        decoding = self.span(Moment.FIRST_TOKEN, Moment.LAST_TOKEN)
        return None if decoding is None else decoding / (self.output_tokens - 1)

    @property
    def queue_prefill_s(self) -> float | None:
        return self.span(Moment.ARRIVED, Moment.PREFILL_STARTED)

    @property
    def prefill_s(self) -> float | None:
        return self.span(Moment.PREFILL_STARTED, Moment.FIRST_TOKEN)

    @property
    def transfer_s(self) -> float | None:
        return self.span(Moment.HANDOFF_STARTED, Moment.HANDOFF_ENDED)

    @property
    def visible_transfer_s(self) -> float | None:
        visible = self.span(Moment.FIRST_TOKEN, Moment.HANDOFF_ENDED)
        return None if visible is None else max(0.0, visible)

    @property
    def queue_decode_s(self) -> float | None:
        """Seconds in the decode queue: after first token and KV transfer, until the first decode iteration."""
        if Moment.DECODE_STARTED not in self.moments or Moment.FIRST_TOKEN not in self.moments:
            return None
        first = self.moments[Moment.FIRST_TOKEN]
        ready = max(first, self.moments.get(Moment.HANDOFF_ENDED, first))
        return max(0.0, self.moments[Moment.DECODE_STARTED] - ready)

    @property
    def timings(self) -> RequestTimings:
        """Phases of the request so far. Their parts sum up exactly, although the clocks of hosts differ a little."""
        at, second = self.moments.get, self.token_times_s[1] if len(self.token_times_s) > 1 else None
        first, sent, received = at(Moment.FIRST_TOKEN), at(Moment.HANDOFF_STARTED), at(Moment.HANDOFF_ENDED)
        if first is None:
            return RequestTimings()
        arrived = self.moments[Moment.ARRIVED]
        routed = _between(arrived, at(Moment.ROUTED), first)
        started = _between(routed, at(Moment.PREFILL_STARTED), first)
        parts: dict[str, float] = {"gateway_queue_s": routed - arrived, "prefill_queue_s": started - routed}
        parts |= {"prefill_s": first - started, "ttft_s": first - arrived}
        if sent is not None and received is not None:
            parts["kv_transfer_hidden_s"] = max(0.0, min(first, received) - sent)
        if second is not None:
            ready = _between(first, received, second)
            decoding = _between(ready, at(Moment.DECODE_STARTED), second)
            parts |= {"kv_transfer_visible_s": ready - first} if received is not None else {}
            parts |= {"decode_queue_s": decoding - ready, "first_decode_s": second - decoding}
            parts["first_gap_s"] = second - first
        return RequestTimings(**parts)


def _between(earliest: float, moment: float | None, latest: float) -> float:
    """Return a moment between two others, the earlier one if it was not recorded."""
    return earliest if moment is None else min(max(earliest, moment), latest)
