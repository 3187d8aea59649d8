"""A request under way in the simulator, in whole picoseconds."""

from dataclasses import dataclass

from twofold.handoff import HandoffMode, Lease
from twofold.request import FinishReason, Request
from twofold.simulation.kernel import PS
from twofold.timeline import Moment, Timeline


@dataclass(slots=True, eq=False)
class Life:
    """The moments of `twofold.timeline` as far as they have come, and what the driver must remember of a hand-off."""

    request: Request
    number: int
    arrived: int
    prefill: str = ""
    decode: str = ""
    mode: HandoffMode | None = None
    prefill_started: int | None = None
    first_token: int | None = None
    handoff_started: int | None = None
    handoff_ended: int | None = None
    decode_started: int | None = None
    last_token: int | None = None
    preemptions: int = 0
    lease: Lease | None = None
    layers_sent: int | None = (
        None  # when the last byte was through, of a layer-wise hand-off that awaits its prefill
    )
    ended: bool = False

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
