"""A request under way in the simulator, in whole picoseconds."""

from twofold.handoff import HandoffMode, Lease
from twofold.request import FinishReason, Request
from twofold.simulation.kernel import PS
from twofold.timeline import Moment, Timeline


class Life:
    """The moments of `twofold.timeline` as far as they have come, and what the driver must remember of a hand-off."""

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
    )

    def __init__(self, request: Request, number: int, arrived: int) -> None:
        self.request = request
        # Again what the request says, because they are asked for at every step.
        self.id = request.id
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.number = number
        self.arrived = arrived
        self.prefill = ""
        self.decode = ""
        self.mode: HandoffMode | None = None
        self.prefill_started: int | None = None
        self.first_layer = 0  # when the first layer of its prefill is computed
        self.first_token: int | None = None
        self.handoff_started: int | None = None
        self.handoff_ended: int | None = None
        self.decode_started: int | None = None
        self.last_token: int | None = None
        self.preemptions = 0
        self.lease: Lease | None = None
        # When the last byte was through, of a layer-wise hand-off that awaits the end of its prefill.
        self.layers_sent: int | None = None
        self.ended = False

    @property
    def splits(self) -> bool:
        return self.prefill != self.decode

    def timeline(self, reason: FinishReason, output_tokens: int) -> Timeline:
        """The same for those who look at requests from outside: seconds, under the names both worlds use."""
        moments = (
            (Moment.ARRIVED, self.arrived),
            (Moment.ROUTED, self.arrived if self.prefill else None),
            (Moment.PREFILL_STARTED, self.prefill_started),
            (Moment.HANDOFF_STARTED, self.handoff_started),
            (Moment.FIRST_TOKEN, self.first_token),
            (Moment.HANDOFF_ENDED, self.handoff_ended),
            (Moment.DECODE_STARTED, self.decode_started),
            (Moment.LAST_TOKEN, self.last_token),
        )
        return Timeline(
            self.request,
            {moment: at / PS for moment, at in moments if at is not None},
            output_tokens=output_tokens,
            finish_reason=reason,
            prefill_instance=self.prefill or None,
            decode_instance=self.decode or None,
            preemptions=self.preemptions,
        )
