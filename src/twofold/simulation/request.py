"""A request under way in the simulator; times are integer picoseconds."""

from typing import Final

from mypy_extensions import mypyc_attr

from twofold.cluster.timing import PS
from twofold.handoff import HandoffMode, Lease
from twofold.request import FinishReason, Request
from twofold.simulation.instance import SimulatedInstance
from twofold.timeline import Moment, Timeline

NEVER: Final = -1  # a missing moment; faster than an optional integer


@mypyc_attr(free_list_len=1)
class SimulatedRequest:
    """The moments of a request so far (see `twofold.timeline`) and the state of its hand-off."""

    __slots__ = (
        "arrived",
        "decode",
        "decode_started",
        "ended",
        "first_layer",
        "first_token",
        "handoff_ended",
        "handoff_started",
        "id",
        "last_token",
        "layers_sent",
        "lease",
        "mode",
        "number",
        "output_tokens",
        "preemptions",
        "prefill",
        "prefill_started",
        "prompt_tokens",
        "request",
        "splits",
    )

    def __init__(
        self,
        request: Request,
        number: int,
        arrived: int,
        prefill: SimulatedInstance,
        decode: SimulatedInstance,
        mode: HandoffMode | None,
    ) -> None:
        self.request = request
        # Copies of the fields of the request for faster access.
        self.id = request.id
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.number = number
        self.arrived = arrived
        self.prefill = prefill
        self.decode = decode
        self.splits = prefill is not decode
        self.mode = mode
        self.prefill_started = NEVER
        self.first_layer = NEVER  # end of the first layer of the prefill
        self.first_token = NEVER
        self.handoff_started = NEVER
        self.handoff_ended = NEVER
        self.decode_started = NEVER
        self.last_token = NEVER
        # End of a layer-wise transfer that waits for the end of the prefill.
        self.layers_sent = NEVER
        self.preemptions = 0
        self.lease: Lease | None = None
        self.ended = False

    def timeline(self, reason: FinishReason, output_tokens: int) -> Timeline:
        """Convert to a timeline in seconds."""
        moments = (
            (Moment.ARRIVED, self.arrived),
            (Moment.ROUTED, self.arrived),
            (Moment.PREFILL_STARTED, self.prefill_started),
            (Moment.HANDOFF_STARTED, self.handoff_started),
            (Moment.FIRST_TOKEN, self.first_token),
            (Moment.HANDOFF_ENDED, self.handoff_ended),
            (Moment.DECODE_STARTED, self.decode_started),
            (Moment.LAST_TOKEN, self.last_token),
        )
        return Timeline(
            self.request,
            {moment: at / PS for moment, at in moments if at != NEVER},
            output_tokens=output_tokens,
            finish_reason=reason,
            prefill_instance=self.prefill.name,
            decode_instance=self.decode.name,
            preemptions=self.preemptions,
        )


def refused_timeline(request: Request, arrived: int) -> Timeline:
    """The timeline of a rejected request."""
    return Timeline(request, {Moment.ARRIVED: arrived / PS}, finish_reason=FinishReason.ERROR)
