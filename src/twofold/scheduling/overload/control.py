"""Who is refused, and until when: a rule, the ledger that it looks at, and how urgent requests are."""

from math import ceil
from typing import Final

from twofold.scheduling.admission_limits import Refusal, RefusalReason
from twofold.scheduling.overload.ledger import Ledger, Newcomer
from twofold.scheduling.overload.rule import Overload

NEVER: Final = 1 << 30  # seconds: a request that would come too late at any time
_STEP, _STEPS = 0.1, 5  # how much of the bound each step of priority leaves to those before, and how often


class OverloadControl:
    """A driver asks at `arrival`, says what was `placed`, asks again when a prompt is `prefilled`, says what `ended`.

    A request is refused whose load is above 1 (see `Overload`). Of less urgent ones, whose priority is above 0, each
    step of priority lowers that by a tenth, to a half at most: their wait, and the decodes beside them, leave room for
    others.
    """

    def __init__(self, rule: Overload, ledger: Ledger) -> None:
        self.ledger = ledger
        self._rule = rule

    def arrival(self, newcomer: Newcomer, now: float, priority: int = 0) -> RefusalReason | None:
        """Why a request is not taken; None if it is."""
        most = _most(priority)
        alone, decode_alone = self.ledger.alone(newcomer)
        load = self._rule.prefill_load(newcomer, self.ledger, now)
        if load > 1.0 or load - alone > most:
            return RefusalReason.PREFILL_LOAD if alone <= 1.0 else RefusalReason.BEYOND_SLO
        decode_load = self._rule.decode_load(newcomer, self.ledger, now)
        if decode_load > most and decode_alone > 1.0:
            return RefusalReason.BEYOND_SLO
        return RefusalReason.DECODE_LOAD if decode_load > max(most, decode_alone) else None

    def refusal(self, newcomer: Newcomer, reason: RefusalReason, now: float, priority: int = 0) -> Refusal:
        """The reason, and after how many seconds the load would be low enough if nobody else came."""
        ledger, most = self.ledger, _most(priority)
        alone, decode_alone = ledger.alone(newcomer)
        if reason is RefusalReason.BEYOND_SLO:
            return Refusal(reason, NEVER)
        if reason is RefusalReason.PREFILL_LOAD:
            load = ledger.prefill_load(newcomer, now)
            wait_s = max(load - 1.0, load - alone - most) * ledger.ttft_s
        else:
            wait_s = ledger.decode_relief_s(newcomer, max(most, decode_alone), now)
        return Refusal(reason, max(1, ceil(wait_s)))

    def placed(self, newcomer: Newcomer, now: float) -> float:
        """A request is on its way to its prefill instance; returns its predicted TTFT."""
        return self.ledger.placed(newcomer, now)

    def prefilled(self, request_id: str, now: float, *, sure: bool = False) -> RefusalReason | None:
        """A prompt is computed: why its decode instance does not take it; None if it does, as it must if it is `sure`.

        One that is refused is still to be said to have ended.
        """
        newcomer = self.ledger.prefilled(request_id, now)
        if newcomer is None or not newcomer.decodes:
            return None
        if not sure and self._rule.load_after_prefill(newcomer, self.ledger, now) > 1.0:
            return RefusalReason.DECODE_LOAD
        self.ledger.decodes(newcomer, now)
        return None

    def ended(self, request_id: str, now: float, output_tokens: int | None = None) -> None:
        """A request is over; `output_tokens` if it is complete. One that was not placed is none of our business."""
        self.ledger.ended(request_id, now, output_tokens)


def _most(priority: int) -> float:
    return 1.0 - _STEP * min(max(priority, 0), _STEPS)
